"""Rows of an environment, read in a process of its own so that its code stays out of the node.

    python -m roles.tasks.environment_rows < {"name", "arguments", "rows_max", "path", "cwd"}
    ← {"row": {…}} or {"skipped": reason} a line a task; {"error": "one line"} at the end if it failed

Whoever reads tasks allowed the environment's module: it runs with the operator's rights, since tasks often
come from the Hub or from files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import roles
from protocol.errors import OperatorError, one_line
from protocol.runspec import TasksSpec
from roles.tasks.environment import Environment
from roles.tasks.reasoning_gym import ANY_ANSWER
from roles.tasks.taskset import Row, Skipped

ROWS_DEFAULT = 10_000
"""Of an environment that goes on for ever."""

ENVIRONMENT, INDEX, HASH = "environment", "environment_task", "environment_task_hash"
"""What a row's metadata says of the task that it is: its environment, number and content."""

MODULE = "roles.tasks.environment_rows"


def read(name: str, spec: TasksSpec) -> Iterator[Row | Skipped]:
    """The first ``rows_max`` tasks (10 000 when it is not set) of an installed environment.

    Raises OperatorError if it cannot be opened or fails on the way.
    """
    cwd = str(Path.cwd())
    asked = {
        "name": name,
        "arguments": spec.arguments,
        "rows_max": spec.rows_max or ROWS_DEFAULT,
        "path": [*sys.path, cwd],
        "cwd": cwd,
    }
    (root, *_) = roles.__path__
    command = [sys.executable, "-m", MODULE]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, cwd=Path(root).parent, check=False
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode and not any("error" in one for one in said):
        why = one_line((done.stderr.strip().splitlines() or ["no reason given"])[-1])
        raise OperatorError(f"tasks.source verifiers:{name}: its process ended: {why}")
    for index, one in enumerate(said):
        if "error" in one:
            raise OperatorError(f"tasks.source {one['error']}")
        origin = f"verifiers:{name} {index}"
        yield Skipped(origin, one["skipped"]) if "skipped" in one else Row(origin=origin, **one["row"])


def main() -> None:
    """Write the rows that were asked for."""
    asked = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with Path(os.devnull).open("w") as nothing:  # what the environment prints is not a row
        os.dup2(nothing.fileno(), 1)
    sys.path[:] = asked["path"]
    os.chdir(asked["cwd"])
    with out:
        try:
            _write(out, Environment(asked["name"], asked["arguments"]), asked["rows_max"])
        except OperatorError as exc:
            out.write(json.dumps({"error": str(exc)}) + "\n")
            out.flush()
            os._exit(1)  # not every environment lets go of its threads
    os._exit(0)


def _write(out: TextIO, environment: Environment, rows_max: int) -> None:
    for index in range(rows_max):
        task = environment.task(index)
        if task is None:
            return
        out.write(json.dumps(_described(task, environment.name, index)) + "\n")


def _described(task: Any, name: str, index: int) -> dict[str, Any]:
    """A task as a row, or why it is none: what needs more than a prompt of text cannot be sampled here."""
    if type(task).NEEDS_CONTAINER:
        return {"skipped": "it needs a container"}
    data = task.data.model_dump(mode="json")
    system, prompt, reason = _texts(data)
    if reason is not None:
        return {"skipped": reason}
    answer = data.get("answer")
    row = {
        "prompt": prompt,
        "system_prompt": system,
        "answer": str(answer)
        if isinstance(answer, str | int | float) and str(answer).strip()
        else ANY_ANSWER,
        "metadata": {ENVIRONMENT: name, INDEX: index, HASH: task.hash},
    }
    return {"row": row}


def _texts(data: Mapping[str, Any]) -> tuple[str | None, str, str | None]:
    """System prompt and prompt of a task, and why it has none that is text."""
    system, prompt = data.get("system_prompt"), data.get("prompt")
    if isinstance(prompt, list):
        messages = [(message["role"], message["content"]) for message in prompt]
        if messages and messages[0][0] == "system" and system is None:
            system = messages.pop(0)[1]
        if len(messages) != 1 or messages[0][0] != "user":
            return (
                None,
                "",
                f"its prompt has messages of {', '.join(role for role, _ in messages) or 'nobody'}",
            )
        prompt = messages[0][1]
    if not isinstance(prompt, str) or not isinstance(system, str | None):
        return None, "", "its prompt is no text"
    if not prompt.strip():
        return None, "", "its prompt is empty"
    return system, prompt, None


if __name__ == "__main__":
    main()
