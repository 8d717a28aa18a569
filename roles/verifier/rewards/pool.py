"""A pool of killable reward workers: one hanging sample costs its own time limit and nothing else.

    score() ─▶ turn (as many as workers) ─▶ a warm worker ─▶ Score
                 └── after PATIENCE_S the turn passes on: whoever hangs keeps its process, not its place

Killed workers are replaced in the background, and one more than needed is kept warm, because importing
math-verify takes a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.reward import Item, Score
from roles.verifier.rewards.worker_process import WorkerDied, WorkerProcess

PATIENCE_S = 0.5
"""Honest scoring takes milliseconds; what takes longer than this counts as slow and gives up its turn."""

SLOW_PER_WORKER = 4
"""Slow items that may run beside each worker; beyond that the others wait. Bounds memory."""

WARM_SPARES = 1

ATTEMPTS = 2
"""A worker that dies is not the item's fault at first; the second time the item is unscorable."""


class WorkerPool:
    """Scores items in worker processes. Open it, or use it as an async context manager."""

    def __init__(self, specs: Sequence[RewardSpec], workers: int) -> None:
        """``specs`` are all rewards that its workers must know; nothing starts yet."""
        self._specs = list(specs)
        self._workers = workers
        self._turns = asyncio.Semaphore(workers)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._slow = 0
        self._closed = False

    @property
    def pids(self) -> set[int]:
        """Process ids of all workers that are ready."""
        return {worker.pid for worker in (*self._idle, *self._busy)}

    async def open(self) -> None:
        """Start one worker and return when it is ready; the others follow. Raises OperatorError."""
        self._idle.append(await WorkerProcess.start(self._specs))
        self._refill()

    async def warm(self) -> None:
        """Return once every worker that was started is ready."""
        while self._starting:
            await asyncio.wait(self._starting)

    async def score(self, spec: RewardSpec, item: Item) -> Score:
        """Score one item; a limit that is hit gives 0.0 with the note ``timeout`` or ``memory``."""
        for _ in range(ATTEMPTS):
            try:
                return await self._scored(spec, item)
            except WorkerDied:
                if self._closed:
                    break
        return Score.none(Unscorable.REWARD_FAILED, "the reward's process died")

    async def close(self) -> None:
        """Kill all workers; scores that somebody still awaits become unscorable."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in (*self._idle, *self._busy)))
        self._idle.clear()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _scored(self, spec: RewardSpec, item: Item) -> Score:
        await self._turns.acquire()
        turn = _Turn(self._pass_on)
        try:
            worker = await self._take()
            self._busy.add(worker)
            turn.begin()
            try:
                return await worker.ask(spec, item)
            finally:
                self._busy.discard(worker)
                self._put_back(worker)
        finally:
            if turn.end():
                self._slow -= 1
            else:
                self._turns.release()

    async def _take(self) -> WorkerProcess:
        """A warm worker, or the next that becomes one. Raises OperatorError if none can be started."""
        while not self._idle and self._starting:
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        return self._idle.pop() if self._idle else await WorkerProcess.start(self._specs)

    def _pass_on(self) -> bool:
        """Let the next item begin beside one that takes long; False if too many do."""
        if self._slow >= self._workers * SLOW_PER_WORKER:
            return False
        self._slow += 1
        self._turns.release()
        self._refill()
        return True

    def _put_back(self, worker: WorkerProcess) -> None:
        if not worker.usable:
            self._refill()
        elif self._closed or len(self._idle) >= self._workers + WARM_SPARES:
            self._in_background(worker.kill())
        else:
            self._idle.append(worker)

    def _refill(self) -> None:
        """Start workers in the background until there is one for each turn, and the spares."""
        fast = len(self._busy) - self._slow
        missing = self._workers + WARM_SPARES - len(self._idle) - len(self._starting) - fast
        for _ in range(0 if self._closed else missing):
            self._in_background(self._start_one())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_one(self) -> None:
        # The first worker opened the same rewards: should they fail now, whoever needs a worker is told.
        with contextlib.suppress(OperatorError):
            self._idle.append(await WorkerProcess.start(self._specs))


class _Turn:
    """An item's place among the fast ones; it passes the place on when it takes long."""

    def __init__(self, pass_on: Callable[[], bool]) -> None:
        self._pass_on = pass_on
        self._timer: asyncio.TimerHandle | None = None
        self._passed = False

    def begin(self) -> None:
        """Its worker works now: patience begins."""
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._expire)

    def end(self) -> bool:
        """Done. True if the place was passed on before."""
        if self._timer is not None:
            self._timer.cancel()
        return self._passed

    def _expire(self) -> None:
        self._passed = self._pass_on()
        if not self._passed:
            self.begin()
