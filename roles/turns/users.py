"""A run's simulated user as a sampler asks it: the run's function, in the same locked process as tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import structlog

from protocol.messages import Told
from protocol.tools_spec import ToolsSpec
from protocol.user_spec import PROMPT, UserSpec
from roles.turns.calls import ToolCall
from roles.turns.cutting import cut
from roles.turns.tools import HostKind, ToolProcess
from roles.turns.user_host import NOTHING, SAID, USER

log = structlog.get_logger()

KIND = HostKind("roles.turns.user_host", "user", "the user's process")


class User(Protocol):
    """Who answers turns that call nothing."""

    async def answer(self, told: Told, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """What the user says after ``messages``, which follow the prompt; None ends the rollout.

        Raises EngineError if nobody can be asked at all.
        """
        ...


class UserProcess:
    """Implements ``User`` with ``user_host.py``. Make one with ``open``."""

    def __init__(self, spec: UserSpec, process: ToolProcess) -> None:
        self._spec = spec
        self._process = process

    @classmethod
    async def open(cls, spec: UserSpec) -> UserProcess:
        """Start. Raises OperatorError if the function cannot be had."""
        limits = ToolsSpec(
            functions=(spec.function,),
            timeout_s=spec.timeout_s,
            memory_bytes_max=spec.memory_bytes_max,
            reply_chars_max=len(SAID) + spec.reply_chars_max,
        )
        return cls(spec, await ToolProcess.open(limits, KIND))

    async def answer(self, told: Told, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """What goes wrong is said to the model, as a tool's faults are, and logged."""
        arguments = {"messages": [*_asked(told), *messages], "row": {PROMPT: told.prompt, **told.columns}}
        reply = await self._process.reply(ToolCall(USER, arguments))
        if reply == NOTHING:
            return None
        if not reply.startswith(SAID):
            log.warning("user_failed", user=self._spec.function, why=reply)
        return cut(reply.removeprefix(SAID).strip(), self._spec.reply_chars_max)

    async def close(self) -> None:
        """End the process and what it runs."""
        await self._process.close()


async def check_user(spec: UserSpec) -> None:
    """Raises OperatorError if the function cannot be had."""
    await (await UserProcess.open(spec)).close()


def _asked(told: Told) -> list[dict[str, Any]]:
    system = [] if told.system_prompt is None else [{"role": "system", "content": told.system_prompt}]
    return [*system, {"role": "user", "content": told.prompt}]
