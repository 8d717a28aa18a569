"""From one raw record (a JSON object, a dataset row) to a Row, or to the reason why it is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.runspec import TasksSpec
from roles.tasks.taskset import Row, Skipped


class _Unusable(Exception):
    """Carries the reason from a field to its record."""


def row_from(record: Mapping[str, Any], spec: TasksSpec, origin: str) -> Row | Skipped:
    """Take prompt and answer out of ``record``; all other fields become metadata.

    A whole-number answer becomes its digits (10 is ``"10"``). Nothing is guessed: what is missing,
    null, blank or no text is skipped with the reason.
    """
    try:
        prompt = _text(record, spec.prompt_column, "prompt")
        answer = _text(record, spec.answer_column, "answer")
        if spec.answer_after is not None:
            answer = _tail(answer, spec.answer_after)
    except _Unusable as exc:
        return Skipped(origin, str(exc))
    used = (spec.prompt_column, spec.answer_column)
    return Row(prompt, answer, origin, {key: value for key, value in record.items() if key not in used})


def _text(record: Mapping[str, Any], column: str, what: str) -> str:
    name = what if column == what else f"{what} (column {column!r})"
    if column not in record:
        raise _Unusable(f"no {name}")
    value = record[column]
    if value is None:
        raise _Unusable(f"{name} is null")
    if isinstance(value, int | float) and not isinstance(value, bool) and what == "answer":
        value = str(value)
    if not isinstance(value, str):
        raise _Unusable(f"{name} is a {type(value).__name__}, not text")
    if not value.strip():
        raise _Unusable(f"{name} is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _Unusable(f"{name} is not valid Unicode")
    return value


def _tail(answer: str, marker: str) -> str:
    _, found, tail = answer.rpartition(marker)
    if not found:
        raise _Unusable(f"no {marker!r} in the answer")
    if not tail.strip():
        raise _Unusable(f"nothing after {marker!r} in the answer")
    return tail.strip()
