"""Tests of conversations with tools."""

from __future__ import annotations
