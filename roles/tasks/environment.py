"""Environments of the verifiers library: what their names mean, and the tasks in them.

An environment is an installed package whose module exports a ``Taskset``. Opening one runs its code, so a
node does it only where its operator allowed the module, and in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from protocol.errors import OperatorError, one_line
from roles.tasks.environment_arguments import config_of

INSTALL = "pip install 'grpo-node[verifiers]'"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def environment_module(name: str) -> str:
    """The Python module of environment ``name``: ``my-env`` is package ``my_env``, installed by a person.

    Raises OperatorError for what is no such name: nothing is ever fetched because a run names it.
    """
    if not _NAME.fullmatch(name):
        raise OperatorError(
            f"verifiers:{one_line(name, 80)}: name an environment that is installed, such as verifiers:my-env"
        )
    return name.replace("-", "_")


class Environment:
    """An open environment. Its tasks are numbered in the order in which it gives them, which must be the same
    on every machine."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Import it. ``arguments`` are ``tasks.arguments`` of the run.

        Raises OperatorError if the library or the environment is missing, or is none, or does not take them.
        """
        module = environment_module(name)
        try:
            from verifiers.v1.utils.loaders import taskset_class, taskset_config_type
        except ImportError as exc:
            raise OperatorError(f"verifiers:{name} needs a library: {INSTALL}") from exc
        try:
            config = config_of(taskset_config_type(module), module, arguments)
            self._taskset = taskset_class(module)(config)
            self._coming: Iterator[Any] = iter(self._taskset)
        except OperatorError as exc:
            raise OperatorError(f"verifiers:{name}: {exc}") from exc
        except Exception as exc:
            text = one_line(str(exc).strip().partition("\n")[0])
            raise OperatorError(f"verifiers:{name} cannot be opened: {type(exc).__name__}: {text}") from exc
        self.name = name
        self._tasks: list[Any] = []

    def task(self, index: int) -> Any | None:
        """The library's ``Task`` number ``index``; None if there are fewer. Raises what loading it raises."""
        while len(self._tasks) <= index:
            task = next(self._coming, None)
            if task is None:
                return None
            self._tasks.append(task)
        return self._tasks[index]
