"""Tests of the task sets and of prompts."""

from __future__ import annotations
