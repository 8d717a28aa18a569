"""The issuer: turns rows into tasks, as many as admission allows, in a seeded order.

The order and every task's seed follow from the run's seed, the learner and the task's number alone,
so a restarted learner goes on with exactly the tasks that its predecessor would have issued.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.clock import VectorClock
from protocol.codec import readable
from protocol.errors import BusError, OperatorError, WrongRevision
from protocol.messages import DeadLetter, Head, SamplingParams, Task
from protocol.runspec import RunSpec
from protocol.subjects import TRAINING, Bucket, Queue, cursor_key
from roles.learner.admission import groups_in_flight, tasks_to_issue
from roles.learner.done import is_done
from roles.learner.outstanding import Cursor, Outstanding, task_of
from roles.ring import Ring, nap
from roles.tasks.prompts import Prompt

RECOUNT_S = 0.5
"""How often the broker's counts are read even if nothing was committed meanwhile."""

SWEEP_S = 10.0
"""How often a learner looks what became of its oldest tasks."""

SWEPT = 4
"""Tasks that one look asks for at a time."""


class TaskStream:
    """Task number ``k`` of a learner, for every ``k`` (pure)."""

    def __init__(self, spec: RunSpec, learner: str, prompts: Sequence[Prompt]) -> None:
        """``prompts`` are the rows of the training split that fit. Raises OperatorError if there are none."""
        if not prompts:
            raise OperatorError("there is no row to train on: tasks.held_out takes them all")
        self._spec = spec
        self._learner = learner
        self._prompts = prompts
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def task(self, number: int, clock: VectorClock) -> Task:
        """The task; every row comes once per epoch, in a fresh order each time."""
        epoch, position = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            generator = np.random.default_rng([self._spec.seed, epoch, _number(self._learner)])
            self._epoch, self._order = epoch, generator.permutation(len(self._prompts))
        prompt = self._prompts[int(self._order[position])]
        sampling = self._spec.sampling
        return Task(
            run=self._spec.name,
            group_id=f"{self._learner}.{number}",
            row=prompt.row,
            prompt_token_ids=prompt.token_ids,
            told=prompt.told,
            group_size=sampling.group_size,
            params=sampling_params(self._spec),
            seed=_number(f"{self._spec.seed}/{self._learner}/{number}"),
            clock=clock,
            deadline_s=sampling.deadline_s,
        )


class Issuer:
    """Keeps the admission bound filled."""

    def __init__(
        self,
        ring: Ring,
        stream: TaskStream,
        clock_now: Callable[[], VectorClock],
        learners_now: Callable[[], int],
        check_alone: Callable[[], Awaitable[None]],
    ) -> None:
        """``clock_now`` gives the newest committed clock, ``learners_now`` the number of live learners;
        ``check_alone`` raises FencedError if another process has taken this learner's name."""
        self._ring = ring
        self._stream = stream
        self._clock_now = clock_now
        self._learners_now = learners_now
        self._check_alone = check_alone
        self._key = cursor_key(ring.identity.node)
        self._revision = 0
        self._lost = False
        """The broker lost its disk: what is outstanding must be issued again."""
        self._swept_at = 0.0
        self._stuck_at = -1
        self.outstanding = Outstanding()
        self.in_flight = 0
        self.wake = asyncio.Event()

    async def resume(self, head: Head) -> None:
        """Go on at the later of the committed cursor and the one kept beside the queue.

        From now on there is one: that it is gone, or another's, tells of a broker that lost its disk.
        """
        entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.RUN, self._key))
        kept = Cursor.parse(entry.value) if entry else Cursor(head.floor)
        self.outstanding = Outstanding(min(head.floor, kept.next), max(head.cursor, kept.next))
        self._revision = entry.revision if entry else 0
        self._lost = kept.restored or (entry is None and head.count > 0)
        if entry is None:
            await (self._mark_lost() if self._lost else self._keep_cursor())

    def settled(self, group_ids: Iterable[str]) -> None:
        """These groups were consumed or buried; only this learner's own matter."""
        tasks = (task_of(group_id) for group_id in group_ids)
        own = self._ring.identity.node
        self.outstanding.settle(number for learner, number in filter(None, tasks) if learner == own)

    async def run(self) -> None:
        """Issue for ever; woken by commits, otherwise looks twice a second."""
        while True:
            try:
                await self._fill()
                await self._sweep()
            except BusError as exc:
                self._ring.log.warning("issue_postponed", error=str(exc) or type(exc).__name__)
            await nap(self._ring.clock, RECOUNT_S, self.wake)

    async def _fill(self) -> None:
        bus, spec = self._ring.bus, self._ring.spec
        if self._lost:
            await self._issue_again()
            if self._lost:
                return
        self.in_flight = groups_in_flight([await bus.depth(queue) for queue in TRAINING])
        room = tasks_to_issue(
            self.in_flight,
            max_staleness=spec.staleness.max_staleness,
            publish_every=spec.learner.publish_every,
            groups_per_update=spec.learner.groups_per_update,
            learners=self._learners_now(),
        )
        if not room:
            return
        cursor = self.outstanding.cursor
        await self._issue(range(cursor, cursor + room))
        # Only now: a crash in between issues the same tasks again, under the same ids.
        self.outstanding.issued(room)
        self.in_flight += room
        await self._keep_cursor()

    async def _issue(self, numbers: Iterable[int]) -> None:
        tasks = [self._stream.task(number, self._clock_now()) for number in numbers]
        await self._ring.send_all(Queue.TASK, {f"task:{task.group_id}": task for task in tasks})

    async def _keep_cursor(self) -> None:
        """Write the cursor beside the queue; notices by its revision that the broker was restored."""
        await self._write_cursor(Cursor(self.outstanding.cursor))

    async def _write_cursor(self, cursor: Cursor) -> None:
        bus, value = self._ring.bus, str(cursor).encode()
        try:
            self._revision = await self._ring.persist(
                lambda: bus.put(Bucket.RUN, self._key, value, expected=self._revision)
            )
            return
        except WrongRevision:
            await self._check_alone()
            entry = await self._ring.persist(lambda: bus.get(Bucket.RUN, self._key))
        self._revision = entry.revision if entry else 0
        if entry is None or entry.value != value:
            # Restored, or kept by another process of this name meanwhile: tasks may have left the ring.
            self._lost = True

    async def _mark_lost(self) -> None:
        """Say beside the queue that tasks are to be issued again, whatever happens until they are: a crash,
        or a second loss of the broker's disk."""
        await self._write_cursor(Cursor(self.outstanding.floor, 0))

    async def _issue_again(self) -> None:
        """The queues were lost: issue everything that is not settled, under the same ids."""
        await self._mark_lost()
        numbers = [n for n in self.outstanding.all() if not await self._is_done(n)]
        await self._issue(numbers)
        self._lost = False
        await self._keep_cursor()
        await self._ring.tell("tasks_issued_again", tasks=len(numbers), cursor=self.outstanding.cursor)

    async def _sweep(self) -> None:
        """Now and then, find out what peers consumed, and what was buried."""
        now = self._ring.clock.monotonic()
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        while (oldest := self.outstanding.oldest(SWEPT)) and all([await self._is_done(n) for n in oldest]):
            pass
        if self.outstanding.floor == self._stuck_at and self.outstanding.oldest(1):
            letters = readable(await self._ring.bus.dead_letters(), DeadLetter)
            self.settled(letter.group_id for letter in letters if letter.group_id)
        self._stuck_at = self.outstanding.floor

    async def _is_done(self, number: int) -> bool:
        done = await is_done(self._ring.bus, f"{self._ring.identity.node}.{number}")
        if done:
            self.outstanding.settle([number])
        return done


def sampling_params(spec: RunSpec) -> SamplingParams:
    """The run's sampling settings as they travel in a task."""
    sampling = spec.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_new_tokens=sampling.max_new_tokens,
    )


def _number(text: str) -> int:
    """63 bits that depend on ``text`` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
