"""Writes ``examples/arithmetic.jsonl``: every sum of two numbers from 1 to 12, in a fixed order.

python examples/arithmetic.py
"""

from __future__ import annotations

import json
from pathlib import Path

LARGEST = 12


def problems() -> list[dict[str, str]]:
    """One object a line of the file."""
    numbers = range(1, LARGEST + 1)
    return [{"prompt": f"{a} + {b}", "answer": str(a + b)} for a in numbers for b in numbers]


def main() -> None:
    """Write the file beside this script."""
    path = Path(__file__).with_suffix(".jsonl")
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems()))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
