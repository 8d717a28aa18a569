"""A run's tools as a sampler calls them: a process that runs them, started anew when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import structlog

import roles
from protocol.errors import EngineError, OperatorError
from protocol.tools_spec import ToolsSpec
from roles.sandbox.confinement import Protection
from roles.turns.calls import ToolCall
from roles.turns.cutting import cut

log = structlog.get_logger()

START_TIMEOUT_S = 120.0
"""Imports of a tool may be slow; after this long its process counts as broken."""

CALLS_AT_ONCE = 16
"""Children that run at the same time; more calls wait."""

UTF8_BYTES_MAX = 4
"""Of one character."""


@dataclass(frozen=True, slots=True)
class HostKind:
    """What a process runs, and how it is called in messages."""

    module: str
    name: str
    process: str


TOOLS = HostKind("roles.turns.tool_host", "tools", "the tools' process")


class Tools(Protocol):
    """What answers the model's calls."""

    async def reply(self, call: ToolCall) -> str:
        """What the tool says, its faults included. Raises EngineError if nothing can be called at all."""
        ...


class ToolProcess:
    """Implements ``Tools`` with ``tool_host.py``. Make one with ``open``."""

    def __init__(self, spec: ToolsSpec, kind: HostKind = TOOLS) -> None:
        self._spec = spec
        self._kind = kind
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._places = asyncio.Semaphore(CALLS_AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self.schemas = ""
        """What the model is told of the functions, as JSON."""
        self.protections: tuple[str, ...] = ()

    @classmethod
    async def open(cls, spec: ToolsSpec, kind: HostKind = TOOLS) -> ToolProcess:
        """Start. Raises OperatorError if a function cannot be had, or is not the run's."""
        tools = cls(spec, kind)
        try:
            await tools._start()
            if spec.schemas not in {None, tools.schemas}:
                raise OperatorError(
                    f"tools.functions {', '.join(spec.functions)} of this machine are not those that the run "
                    "was created with: their signatures or docstrings differ; install the same version"
                )
        except BaseException:
            await tools.close()
            raise
        missing = [protection for protection in Protection if protection not in tools.protections]
        if missing:
            log.warning(
                "sandbox_is_partial", tools=spec.functions, missing=missing, see="docs/environments.md"
            )
        return tools

    async def reply(self, call: ToolCall) -> str:
        """What the tool says, cut at ``reply_chars_max``."""
        if call.fault is not None:
            return f"error: {call.fault}"
        try:
            async with self._places:
                said = (await self._call(call)).strip()
        except OperatorError as exc:
            raise EngineError(f"{self._kind.process} cannot be started again: {exc}") from exc
        return cut(said, self._spec.reply_chars_max)

    async def close(self) -> None:
        """End the process and what it runs."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await self._end()
        self._fail(f"{self._kind.process} is closed")

    async def _end(self) -> None:
        """End the process, if there is one."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _call(self, call: ToolCall) -> str:
        await self._start()
        assert self._writer is not None, "it was started"
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        asked = {"id": number, "name": call.name, "arguments": call.arguments}
        try:
            self._writer.write(json.dumps(asked).encode() + b"\n")
            return await answer
        finally:
            self._asked.pop(number, None)

    async def _start(self) -> None:
        """Start the process unless it runs. Raises OperatorError."""
        async with self._starting:
            if self._listening is not None and not self._listening.done():
                return
            await self._end()
            ours, theirs = socket.socketpair()
            (root, *_) = roles.__path__
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", self._kind.module,
                    stdin=theirs.fileno(), stdout=DEVNULL, stderr=DEVNULL,
                    cwd=Path(root).parent, start_new_session=True,
                )  # fmt: skip
            limit = 2 * self._settings()["reply_bytes_max"] * UTF8_BYTES_MAX + 4096
            reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=limit)
            self._writer.write(json.dumps(self._settings()).encode() + b"\n")
            said = await self._first(reader)
            if "error" in said:
                raise OperatorError(said["error"])
            self.schemas = json.dumps(said["schemas"], ensure_ascii=False)
            self.protections = tuple(said["protections"])
            self._listening = asyncio.create_task(self._listen(reader))

    def _settings(self) -> dict[str, Any]:
        cwd = str(Path.cwd())  # where a person's own module lies, also when a console script was started
        return {
            "functions": list(self._spec.functions),
            "path": [*sys.path, cwd],
            "cwd": cwd,
            "timeout_s": self._spec.timeout_s,
            "memory_bytes_max": self._spec.memory_bytes_max,
            "reply_bytes_max": (self._spec.reply_chars_max + 1) * UTF8_BYTES_MAX,
        }

    async def _first(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        names = f"{self._kind.name} {', '.join(self._spec.functions)}"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await reader.readline()
        except TimeoutError as exc:
            raise OperatorError(f"{names}: the import takes too long") from exc
        if not line:
            raise OperatorError(f"{names}: {self._kind.process} ends in the import")
        said: dict[str, Any] = json.loads(line)
        return said

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Pass replies on until the process ends."""
        while line := await reader.readline():
            said = json.loads(line)
            answer = self._asked.get(said["id"])
            if answer is not None and not answer.done():
                answer.set_result(said["reply"])
        self._fail(f"{self._kind.process} died")

    def _fail(self, why: str) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineError(why))


async def describe(spec: ToolsSpec) -> ToolsSpec:
    """The same settings with what the model is told of the functions. Raises OperatorError."""
    tools = await ToolProcess.open(spec)
    try:
        return spec.model_copy(update={"schemas": tools.schemas})
    finally:
        await tools.close()
