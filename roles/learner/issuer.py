"""The issuer: turns rows into tasks, as many as admission allows, in a seeded order.

The order and every task's seed follow from the run's seed, the learner and the task's number alone,
so a restarted learner goes on with exactly the tasks that its predecessor would have issued.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.clock import VectorClock
from protocol.errors import BusError, OperatorError
from protocol.messages import SamplingParams, Task
from protocol.runspec import RunSpec
from protocol.subjects import TRAINING, Bucket, Queue, cursor_key
from roles.learner.admission import groups_in_flight, tasks_to_issue
from roles.ring import Ring, nap
from roles.tasks.prompts import Prompt

RECOUNT_S = 0.5
"""How often the broker's counts are read even if nothing was committed meanwhile."""


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
    ) -> None:
        """``clock_now`` gives the newest committed clock, ``learners_now`` the number of live learners."""
        self._ring = ring
        self._stream = stream
        self._clock_now = clock_now
        self._learners_now = learners_now
        self.cursor = 0
        self.in_flight = 0
        self.wake = asyncio.Event()

    async def resume(self, cursor: int) -> None:
        """Go on at the later of the committed cursor and the one kept beside the queue."""
        key = cursor_key(self._ring.identity.node)
        entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.RUN, key))
        self.cursor = max(cursor, int(entry.value) if entry else 0)

    async def run(self) -> None:
        """Issue for ever; woken by commits, otherwise looks twice a second."""
        while True:
            try:
                await self._fill()
            except BusError as exc:
                self._ring.log.warning("issue_postponed", error=str(exc) or type(exc).__name__)
            await nap(self._ring.clock, RECOUNT_S, self.wake)

    async def _fill(self) -> None:
        bus, spec = self._ring.bus, self._ring.spec
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
        tasks = [self._stream.task(self.cursor + k, self._clock_now()) for k in range(room)]
        await self._ring.send_all(Queue.TASK, {f"task:{task.group_id}": task for task in tasks})
        # Only now: a crash in between issues the same tasks again, under the same ids.
        self.cursor += room
        self.in_flight += room
        key, value = cursor_key(self._ring.identity.node), str(self.cursor).encode()
        await self._ring.persist(lambda: bus.put(Bucket.RUN, key, value))


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
