"""Run files that people start from, and the small scripts and rewards that belong to them."""

from __future__ import annotations
