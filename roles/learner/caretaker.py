"""The caretaker: what follows a commit without holding anybody up.

Saves the optimizer's state, exports PEFT directories, and evaluates, one after the other, for the
newest committed head; work for an older head that was not begun yet is skipped.
"""

from __future__ import annotations

import asyncio

from protocol.clock import VectorClock
from protocol.messages import Head
from protocol.ports import AdapterStore, Offload
from roles.learner.checkpoint import export, save_state
from roles.learner.evaluation import Evaluation, Evaluator
from roles.learner.policy import State
from roles.policy.compose import Factors
from roles.ring import Ring, until


class Caretaker:
    """One learner's housekeeping."""

    def __init__(self, ring: Ring, store: AdapterStore, offload: Offload, evaluator: Evaluator) -> None:
        """Idle until ``committed`` is called."""
        self._ring = ring
        self._store = store
        self._offload = offload
        self._evaluator = evaluator
        self._wake = asyncio.Event()
        self._newest: tuple[Head, State, Factors] | None = None
        self._saved = 0
        self._evaluation: Evaluation | None = None

    def committed(self, head: Head, state: State, policy: Factors) -> None:
        """A head was committed; called on the loop, returns at once."""
        self._newest = (head, state, policy)
        self._wake.set()

    async def evaluate(self, clock: VectorClock, version: float) -> None:
        """Begin an evaluation unless there is nothing to evaluate on."""
        if self._evaluator.enabled:
            self._evaluation = await self._evaluator.start(clock, version)

    async def run(self) -> None:
        """Keep house for ever; cancel to stop."""
        settings = self._ring.spec.learner
        exported = evaluated = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            assert self._newest is not None
            head, state, policy = self._newest
            if head.count - self._saved >= settings.state_every:
                await self._save(head, state)
            if settings.export_every and head.count - exported >= settings.export_every:
                await export(self._ring, self._store, self._offload, head, policy)
                exported = head.count
            every = self._ring.spec.eval.every
            idle = self._evaluation is None or self._evaluation.done.is_set()
            if every and idle and head.count - evaluated >= every:
                await self.evaluate(head.clock, head.weight)
                evaluated = head.count

    async def finish(self, stop: asyncio.Event, *, finished: bool) -> None:
        """After the last commit: save the state; if the run is finished, export and evaluate too."""
        if self._newest is None:
            return
        head, state, policy = self._newest
        if head.count > self._saved:
            await self._save(head, state)
        if not finished:
            return
        await export(self._ring, self._store, self._offload, head, policy)
        if self._evaluation is not None:
            await until(stop, self._evaluation.done.wait())
        if self._evaluation is None or self._evaluation.clock != head.clock:
            await self.evaluate(head.clock, head.weight)
        if self._evaluation is not None:
            await until(stop, self._evaluation.done.wait())

    async def _save(self, head: Head, state: State) -> None:
        await save_state(self._ring, self._store, self._offload, head, state)
        self._saved = head.count
