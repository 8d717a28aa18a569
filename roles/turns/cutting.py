"""What a function says at too great length is cut, and says so (pure)."""

from __future__ import annotations

NOTE_CHARS_MAX = 48
"""Of what a cut text says of itself."""


def cut(said: str, chars_max: int) -> str:
    """``said``, or its first ``chars_max`` characters and a note."""
    return said if len(said) <= chars_max else f"{said[:chars_max]} (cut after {chars_max} characters)"
