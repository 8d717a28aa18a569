"""One vLLM server: started and restarted here, or attached to; and whether it lives.

    start ▸ healthy ▸ admitted ──▶ a life ──lost (process ended, no health, stall, amnesia)──▶ start again

A *life* is a span in which the server kept what was loaded into it. Whoever has work in hand under a life
learns from ``lost`` that the work is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from protocol.errors import EngineError, OperatorError, one_line
from protocol.ports import Clock
from roles.sampler.vllm_client import VllmClient

log = structlog.get_logger()

ASK_FIRST_S = 0.25
"""Pause between questions to a server that is starting; doubles up to ``ASK_MAX_S``."""
ASK_MAX_S = 2.0

HEALTH_TRIES = 3
"""A server is dead that did not answer so often."""

STARTS_MAX = 3
"""Starts in a row that may fail before a person must look."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server may take, in seconds."""

    start_s: float = 900.0
    """To become healthy: large models load for minutes."""
    poll_s: float = 10.0
    """Between questions for its health while nothing looks wrong."""
    health_s: float = 20.0
    """To answer such a question; a busy event loop lags."""
    stall_s: float = 60.0
    """For one token, once a whole group came to its deadline without a single completion."""


DEFAULT_PATIENCE = Patience()


class ServerProcess(Protocol):
    """A server started here, with everything it started."""

    @property
    def pid(self) -> int:
        """Of the process that leads its group."""
        ...

    async def ended(self) -> None:
        """Wait for its end."""
        ...

    async def stop(self) -> None:
        """End it, and all its children."""
        ...

    def last_words(self) -> str:
        """The line of its log that says best why it ended."""
        ...


Launch = Callable[[], Awaitable[ServerProcess]]


@dataclass(eq=False, slots=True)
class Life:
    """A span in which a server kept what was loaded into it."""

    lost: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""


class VllmServer:
    """Keeps one server alive. ``open`` before use."""

    def __init__(
        self,
        client: VllmClient,
        clock: Clock,
        admit: Callable[[], Coroutine[Any, Any, None]],
        launch: Launch | None = None,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        """``launch`` starts the server at the client's address; None attaches to one that others run.

        ``admit`` checks a server that has become healthy; it raises OperatorError if it does not do.
        """
        self._client = client
        self._clock = clock
        self._admit = admit
        self._launch = launch
        self._patience = patience
        self.process: ServerProcess | None = None
        self._doubt = asyncio.Event()
        self._stalled = False
        self._watcher: asyncio.Task[None] | None = None
        self.life: Life | None = None
        """The present one, None while the server is down."""
        self.fault: OperatorError | None = None
        """Why it will never live again."""
        self.on_change: Callable[[], None] = lambda: None

    @property
    def attached(self) -> bool:
        """Whether others run it."""
        return self._launch is None

    async def open(self) -> None:
        """Start or find the server, check it, and watch it from then on. Raises OperatorError."""
        try:
            await self._start()
        except EngineError as exc:
            await self._end_process()
            raise OperatorError(one_line(str(exc), 400)) from exc
        except BaseException:
            await self._end_process()
            raise
        self._watcher = asyncio.create_task(self._watch())

    def doubt(self, life: Life, *, stalled: bool = False) -> None:
        """Something went wrong under ``life``: ask for the server's health now, and for a token if it
        ``stalled``."""
        if life is self.life:
            self._stalled = self._stalled or stalled
            self._doubt.set()

    def forgot(self, life: Life) -> None:
        """The server does not know what was loaded into it: somebody else started it again."""
        self._lose(life, "it forgot its adapters")
        self._doubt.set()

    async def close(self) -> None:
        """End what was started here."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        if self.life is not None:
            self._lose(self.life, "the engine is closed")
        await self._end_process()

    async def _watch(self) -> None:
        while self.fault is None:
            assert self.life is not None, "a life is watched from its start"
            self._lose(self.life, await self._end_of(self.life))
            try:
                await self._revive()
            except OperatorError as exc:
                self.fault = exc
                await self._end_process()
        log.error("vllm_given_up", url=self._client.url, error=str(self.fault))
        self.on_change()

    async def _end_of(self, life: Life) -> str:
        """Wait for the end of a life and say why it ended."""
        while True:
            self._doubt.clear()
            if life.lost.is_set():
                return life.why
            if await self._ended_within(self._patience.poll_s, self._doubt):
                return "its process ended"
            if life.lost.is_set():
                return life.why
            stalled, self._stalled = self._stalled, False
            if why := await self._sickness(stalled=stalled):
                return why

    async def _ended_within(self, seconds: float, or_until: asyncio.Event | None = None) -> bool:
        """Wait, and return whether the process ended meanwhile."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._clock.sleep(seconds))]
        if or_until is not None:
            waits.append(asyncio.ensure_future(or_until.wait()))
        end = None if self.process is None else asyncio.ensure_future(self.process.ended())
        try:
            await asyncio.wait({*waits, *([end] if end else [])}, return_when=asyncio.FIRST_COMPLETED)
            return end is not None and end.done()
        finally:
            for wait in (*waits, *([end] if end else [])):
                wait.cancel()

    async def _sickness(self, *, stalled: bool) -> str | None:
        """What the server suffers from, or None."""
        for _ in range(HEALTH_TRIES):
            try:
                await self._client.check_health(self._patience.health_s)
                break
            except EngineError as exc:
                why = str(exc)
            if await self._ended_within(ASK_FIRST_S):
                return "its process ended"
        else:
            return why
        if stalled:
            try:
                base = await self._client.base_model()
                await self._client.complete(_one_token(base.name), timeout_s=self._patience.stall_s)
            except EngineError as exc:
                return f"it does not generate: {exc}"
        return None

    def _lose(self, life: Life, why: str) -> None:
        if not life.lost.is_set():
            log.warning("vllm_lost", url=self._client.url, why=why)
            life.why = why
            life.lost.set()
        if life is self.life:
            self.life = None
            self.on_change()

    async def _revive(self) -> None:
        """Start again, several times if need be. Raises OperatorError in the end."""
        for failed in range(STARTS_MAX):
            try:
                return await self._start()
            except EngineError as exc:
                log.warning("vllm_not_started", url=self._client.url, error=str(exc), tries=failed + 1)
                fault = OperatorError(one_line(str(exc), 400))
        raise fault

    async def _start(self) -> None:
        """To a new life. Raises EngineError if it failed this time, OperatorError if it would every time."""
        if self._launch is not None:
            await self._end_process()
            self.process = await self._launch()
        await self._healthy()
        await self._admit()
        self.life = Life()
        log.info("vllm_lives", url=self._client.url, started_here=self._launch is not None)
        self.on_change()

    async def _healthy(self) -> None:
        """Wait for a server that is starting. Raises EngineError once that is hopeless."""
        until = self._clock.monotonic() + self._patience.start_s
        wait_s = ASK_FIRST_S
        while True:
            try:
                return await self._client.check_health(self._patience.health_s)
            except EngineError as exc:
                why = str(exc)
            if await self._ended_within(wait_s):
                assert self.process is not None, "only a process ends"
                raise EngineError(f"vLLM ended while it started: {self.process.last_words()}")
            if self._clock.monotonic() >= until:
                raise EngineError(f"no vLLM after {self._patience.start_s:g} s: {why}")
            wait_s = min(2 * wait_s, ASK_MAX_S)

    async def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await process.stop()


def _one_token(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": [1], "max_tokens": 1, "ignore_eos": True}
