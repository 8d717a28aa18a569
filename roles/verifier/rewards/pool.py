"""A pool of killable reward workers: one hanging sample costs its own time limit and nothing else.

    score(group) ─▶ turn (as many as workers) ─▶ a warm worker ─▶ one reply an item
                     └── after PATIENCE_S the turn and the rest of the group pass on to another worker: who
                         hangs keeps its process, on what the others leave of the cores, not its place

A group goes to one worker, so that its answer is parsed once. Killed and spent workers are replaced by forks
of a template that has imported everything (``template.py``), and one more than needed is kept warm.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.batch import Batch
from roles.verifier.rewards.registry import NO_ARGUMENTS, Place, single_use
from roles.verifier.rewards.reward import Item, Score
from roles.verifier.rewards.template_process import TemplateProcess
from roles.verifier.rewards.worker_process import WorkerDied, WorkerProcess

PATIENCE_S = 0.05
"""Honest scoring takes milliseconds; what takes more processor time than this counts as slow and gives up its
turn. It is also what a hanging answer takes away from the others, and bounds what one in a hundred costs."""

PATIENCE_WALL_S = 0.5
"""The same for what sleeps, and for the time a worker waits for its turn on a busy machine."""

SHORTEST_LOOK_S = 0.005
"""Looking at a worker's processor time costs some, too."""

SLOW_PER_WORKER = 16
"""Slow items that may run beside each worker; beyond that the others wait. Bounds memory."""

WARM_SPARES = 1

ATTEMPTS = 2
"""A worker that dies is not the item's fault at first; the second time the item is unscorable."""


class WorkerPool:
    """Scores items in worker processes. Open it, or use it as an async context manager."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        workers: int,
        place: Place = Place.OPEN,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> None:
        """``specs`` are all rewards that its workers must know, ``arguments`` those of an environment among
        them; nothing starts yet."""
        self._specs = list(specs)
        self._workers = workers
        self._place = place
        self._arguments = arguments
        self._template: TemplateProcess | None = None
        self._for_groups: frozenset[str] = frozenset()
        self._opening = asyncio.Lock()
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

    @property
    def protections(self) -> tuple[str, ...]:
        """What confines the workers besides being killed."""
        return self._template.protections if self._template else ()

    async def open(self) -> None:
        """Start the template and one worker; the others follow. Raises OperatorError."""
        self._idle.append(await self._new())
        self._refill()

    async def warm(self) -> None:
        """Return once every worker that was started is ready."""
        while self._starting:
            await asyncio.wait(self._starting)

    async def score(self, spec: RewardSpec, items: Sequence[Item]) -> list[Score]:
        """Score the items of a group, in order.

        A limit that an item hits gives it 0.0 with the note ``timeout`` or ``memory``; the others get theirs.
        """
        batch = Batch(spec, items)
        if spec.name in self._for_groups:
            batch.begin(self._serve_group(batch))
        elif single_use(spec.name):
            for index in range(len(items)):
                batch.begin(self._serve(batch, [index]))
        else:
            batch.begin(self._serve(batch, list(range(len(items)))))
        return await batch.scores()

    async def close(self) -> None:
        """Kill all workers; scores that somebody still awaits become unscorable."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in (*self._idle, *self._busy)))
        self._idle.clear()
        if self._template is not None:
            await self._template.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _serve(self, batch: Batch, waiting: list[int]) -> None:
        """Score these items, one after the other, with as many workers as die on the way."""
        while waiting:
            try:
                await self._serve_until_lost(batch, waiting)
            except WorkerDied:
                batch.mark_death(waiting[0])
                if self._closed or batch.deaths_of(waiting[0]) >= ATTEMPTS:
                    batch.settle(waiting.pop(0), _died())

    async def _serve_until_lost(self, batch: Batch, waiting: list[int]) -> None:
        """Score until the list is empty, or the worker is lost or passes the rest on."""

        def pass_the_rest_on() -> None:
            if rest := waiting[1:]:
                del waiting[1:]
                batch.begin(self._serve(batch, rest))

        async with self._lease(pass_the_rest_on) as lease:
            lease.worker.give(batch.spec, [batch.items[index] for index in waiting])
            while waiting and lease.worker.usable and not lease.slow:
                lease.be_patient()
                batch.settle(waiting[0], await lease.worker.reply(batch.spec.timeout_s))
                waiting.pop(0)
            lease.reusable = not waiting and not single_use(batch.spec.name)

    async def _serve_group(self, batch: Batch) -> None:
        """Score a group as one: a limit that it hits leaves all of it without a score."""
        scores, whole = [_died()], False
        for _ in range(1 if self._closed else ATTEMPTS):
            with suppress(WorkerDied):
                async with self._lease(lambda: None) as lease:
                    lease.worker.give(batch.spec, batch.items)
                    lease.be_patient()
                    scores = [await lease.worker.reply(batch.spec.timeout_s)]
                    if lease.worker.usable:
                        scores += [await lease.worker.reply(batch.spec.timeout_s) for _ in batch.items[1:]]
                        whole = lease.reusable = True
                break
        if not whole:
            scores = [Score.none(Unscorable.REWARD_FAILED, scores[0].note)] * len(batch.items)
        for index, score in enumerate(scores):
            batch.settle(index, score)

    @asynccontextmanager
    async def _lease(self, when_slow: Callable[[], None]) -> AsyncIterator[_Lease]:
        """A worker and a turn. A worker comes back into the pool only if its lease says so."""
        await self._turns.acquire()
        lease = _Lease()
        try:
            lease.worker = await self._take()
            lease.pass_on = lambda: self._pass_on(lease.worker, when_slow)
            self._busy.add(lease.worker)
            try:
                yield lease
            finally:
                lease.end()
                self._busy.discard(lease.worker)
                await self._put_back(lease.worker, reusable=lease.reusable and not lease.slow)
        finally:
            if lease.slow:
                self._slow -= 1
            else:
                self._turns.release()

    async def _take(self) -> WorkerProcess:
        """A warm worker, or a new one."""
        return self._idle.pop() if self._idle else await self._new()

    async def _new(self) -> WorkerProcess:
        """Fork a worker; a template that died is replaced first. Raises OperatorError if that fails."""
        async with self._opening:
            if self._template is not None and not self._template.alive:
                await self._template.close()
                self._template = None
            if self._template is None:
                self._template = await TemplateProcess.start(self._specs, self._place, self._arguments)
                self._for_groups = self._template.for_groups
        return await self._template.fork()

    def _pass_on(self, worker: WorkerProcess, when_slow: Callable[[], None]) -> bool:
        """Let the next item begin beside one that takes long; False if too many do."""
        if self._slow >= self._workers * SLOW_PER_WORKER:
            return False
        self._slow += 1
        self._turns.release()
        self._refill()
        worker.yield_to_others()
        when_slow()
        return True

    async def _put_back(self, worker: WorkerProcess, *, reusable: bool) -> None:
        wanted = reusable and worker.usable and not self._closed
        if wanted and len(self._idle) < self._workers + WARM_SPARES:
            self._idle.append(worker)
            return
        await worker.kill()
        self._refill()

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
        # Should it fail, whoever needs a worker is told.
        with suppress(OperatorError, WorkerDied):
            self._idle.append(await self._new())


class _Lease:
    """A worker in use, and its item's place among the fast ones, which passes on when it takes long."""

    worker: WorkerProcess
    pass_on: Callable[[], bool]

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._until = (0.0, 0.0)
        self.slow = False
        self.reusable = False

    def be_patient(self) -> None:
        """The worker begins with an item now, and patience with it."""
        self.end()
        if not self.slow:
            now = asyncio.get_running_loop().time()
            self._until = now + PATIENCE_WALL_S, self.worker.cpu_s() + PATIENCE_S
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._expire)

    def end(self) -> None:
        """Nothing more will be found slow."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        left = min(self._until[0] - loop.time(), self._until[1] - self.worker.cpu_s())
        if left <= 0:
            self.slow, left = self.pass_on(), PATIENCE_S
        if not self.slow:
            self._timer = loop.call_later(max(left, SHORTEST_LOOK_S), self._expire)


def _died() -> Score:
    return Score.none(Unscorable.REWARD_FAILED, "the reward's process died")
