"""A reward for runs that measure: hardly two completions get the same, so every step has an update."""

from __future__ import annotations

import zlib


def unlike(completion: str, answer: str) -> float:
    """Some number in [0, 1) that follows from the text."""
    return zlib.crc32(f"{answer}/{completion}".encode()) / 2**32
