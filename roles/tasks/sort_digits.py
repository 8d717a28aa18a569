"""The built-in generated task: write the four digits of the prompt in ascending order.

``4213>`` has the answer ``1234``. All 10 000 inputs exist, so train and held-out never overlap. It is
what ``builtin:tiny`` was made for: right about one time in four at the start, nearly always at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from roles.tasks.taskset import Row

DIGITS = 4


def read() -> Iterator[Row]:
    """Every input once, in numeric order."""
    for number in range(10**DIGITS):
        digits = f"{number:0{DIGITS}d}"
        yield Row(f"{digits}>", "".join(sorted(digits)), f"sort-digits {digits}")
