"""The task set in a JSONL file: one object a line, with a prompt and an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.record import row_from
from roles.tasks.taskset import Row, Skipped

BOM = b"\xef\xbb\xbf"


def read(path: Path, spec: TasksSpec) -> Iterator[Row | Skipped]:
    """Rows in file order; a line that is no usable row comes out as Skipped with its line number.

    Empty lines and a byte order mark are nothing to report. Raises OperatorError if the file cannot be
    read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = (line.removeprefix(BOM) if number == 1 else line).strip()
                if content:
                    yield _row(content, spec, f"{path.name} line {number}")
    except FileNotFoundError as exc:
        raise OperatorError(f"tasks.source: there is no file {path}") from exc
    except OSError as exc:
        raise OperatorError(f"tasks.source: cannot read {path}: {exc.strerror}") from exc


def _row(content: bytes, spec: TasksSpec, origin: str) -> Row | Skipped:
    try:
        record: Any = json.loads(content.decode())
    except UnicodeDecodeError as exc:
        return Skipped(origin, f"byte 0x{content[exc.start]:02X} at column {exc.start + 1} is not UTF-8")
    except json.JSONDecodeError as exc:
        return Skipped(origin, f"not JSON: {exc.msg} at column {exc.colno}")
    except (RecursionError, ValueError):
        return Skipped(origin, "not JSON that can be read: nested too deep, or a number too long")
    if not isinstance(record, dict):
        return Skipped(origin, "not a JSON object")
    return row_from(record, spec, origin)
