"""What a task tells a simulated user of its row: the prompt and the columns that the run names (pure)."""

from __future__ import annotations

import json

from protocol.limits import TOLD_BYTES_MAX
from protocol.messages import Told
from protocol.runspec import TasksSpec
from protocol.user_spec import UserSpec
from roles.tasks.taskset import Row


def told_of(row: Row, tasks: TasksSpec, user: UserSpec) -> Told:
    """Text as it is, other values as JSON. A column that the row lacks is missing here, too."""
    columns = {name: _text(row.metadata[name]) for name in user.columns if name in row.metadata}
    return Told(prompt=row.prompt, system_prompt=row.system_prompt or tasks.system_prompt, columns=columns)


def untold(told: Told, user: UserSpec) -> str | None:
    """Why a row cannot be used in a run with this user, or None."""
    if missing := [name for name in user.columns if name not in told.columns]:
        return f"no column {missing[0]!r}, which user.columns names"
    size = len(told.model_dump_json().encode())
    if size > TOLD_BYTES_MAX:
        return f"what the user is told has {size} bytes, and the limit is {TOLD_BYTES_MAX}"
    return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
