"""Environments as people write them, imported by their bare names as installed packages are."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
