"""A table of a run file that is handed on as it is: plain JSON values, bounded in size and depth."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator

from protocol.errors import one_line
from protocol.limits import ARGUMENTS_BYTES_MAX, ARGUMENTS_DEPTH_MAX, COUNT_MAX


def _plain(table: Any) -> dict[str, Any]:
    """The table itself. Raises ValueError that names the first value which JSON has not, or what is too much.

    Looks at values one after the other, however deep they lie: a stranger may have written them.
    """
    if not isinstance(table, dict):
        raise ValueError("this is a table")  # noqa: TRY004 what pydantic takes from a validator
    left: list[tuple[str, Any, int]] = [("", table, 0)]
    while left:
        where, value, depth = left.pop()
        if depth > ARGUMENTS_DEPTH_MAX:
            raise ValueError(f"tables and lists lie in each other {ARGUMENTS_DEPTH_MAX} deep at most")
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise ValueError(f"{where or 'its'} keys are texts")
            left += [(f"{where}.{key}" if where else key, one, depth + 1) for key, one in value.items()]
        elif isinstance(value, list | tuple):
            left += [(where, one, depth + 1) for one in value]
        elif fault := _fault(value):
            raise ValueError(one_line(f"{where}: {fault}"))
    size = len(json.dumps(table))
    if size > ARGUMENTS_BYTES_MAX:
        raise ValueError(f"{size} bytes as JSON; {ARGUMENTS_BYTES_MAX} at most")
    return table


def _fault(value: Any) -> str | None:
    """Why a single value is not one that every reader of JSON reads alike."""
    if isinstance(value, bool | str | None):
        return None
    if isinstance(value, int):
        return None if abs(value) <= COUNT_MAX else "this number is too large to be exact"
    if isinstance(value, float):
        return None if abs(value) < float("inf") else "this number is not finite"
    return f"a {type(value).__name__} is no value of JSON; write it as a text"


Arguments = Annotated[dict[str, Any], BeforeValidator(_plain)]
