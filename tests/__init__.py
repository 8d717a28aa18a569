"""Tests read as facts; builders live in ``build.py``."""
