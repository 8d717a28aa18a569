"""Tests of the run files that people start from."""

from __future__ import annotations
