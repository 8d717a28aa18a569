"""A reward of one's own, as a run file names it: ``examples.rewards:last_number``.

A reward takes the completion's text and the row's answer and returns a number. It must be importable
where verifiers run: start them in the directory that holds ``examples``, or put that on PYTHONPATH.
"""

from __future__ import annotations

import re


def last_number(completion: str, answer: str) -> float:
    """1.0 if the last whole number in the completion is the answer, otherwise 0.0."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))
