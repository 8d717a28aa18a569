"""The caretaker: what follows a commit without holding anybody up.

Saves the optimizer's state, exports PEFT directories, and evaluates, one after the other, for the
newest committed head; work for an older head that was not begun yet is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from protocol.clock import VectorClock
from protocol.messages import Head
from protocol.ports import AdapterStore, Offload
from roles.learner.checkpoint import export, save_state, state_path
from roles.learner.evaluation import Evaluation, Evaluator
from roles.learner.policy import State
from roles.policy.compose import Factors
from roles.ring import Ring, until


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed update, and what stands behind it."""

    head: Head
    version: float
    """Of the policy at ``head.clock``."""
    state: Callable[[], State]
    """Gives the optimizer's state once it is copied; it may take a moment."""
    policy: Factors


class Caretaker:
    """One learner's housekeeping."""

    def __init__(
        self,
        ring: Ring,
        store: AdapterStore,
        offload: Offload,
        evaluator: Evaluator,
        leads: Callable[[], bool],
        kept: Callable[[str, str], None],
    ) -> None:
        """Idle until ``committed`` is called; evaluates only while ``leads()``, and tells ``kept`` of every
        state and export that it stored."""
        self._ring = ring
        self._store = store
        self._offload = offload
        self._evaluator = evaluator
        self._leads = leads
        self._kept = kept
        self._wake = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._newest: Committed | None = None
        self._saved = self._exported = self._evaluated = 0
        self._evaluation: Evaluation | None = None

    def start_at(self, count: int) -> None:
        """This learner resumes at its update ``count``: what was due before was done before. Its state is
        saved with the next update all the same, for the one it found may be older."""
        exports, evaluations = self._ring.spec.learner.export_every, self._ring.spec.eval.every
        self._exported = count - count % max(1, exports)
        self._evaluated = count - count % max(1, evaluations)

    def committed(self, newest: Committed) -> None:
        """An update was committed; called on the loop, returns at once."""
        self._newest = newest
        self._wake.set()

    async def evaluate(self, clock: VectorClock, version: float) -> None:
        """Begin an evaluation unless there is nothing to evaluate on."""
        if self._evaluator.enabled:
            self._evaluation = await self._evaluator.start(clock, version)

    async def run(self) -> None:
        """Keep house for ever; cancel to stop."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            async with self._one_at_a_time:
                assert self._newest is not None
                await self._look_after(self._newest)

    async def _look_after(self, newest: Committed) -> None:
        settings, head = self._ring.spec.learner, newest.head
        if head.count - self._saved >= settings.state_every:
            await self._save(newest)
        if settings.export_every and head.count - self._exported >= settings.export_every:
            await self._export(newest)
        every = self._ring.spec.eval.every
        idle = self._evaluation is None or self._evaluation.done.is_set()
        if every and idle and self._leads() and head.count - self._evaluated >= every:
            await self.evaluate(head.clock, newest.version)
            self._evaluated = head.count

    async def finish(self, stop: asyncio.Event, *, finished: bool) -> None:
        """After the last commit: save the state; if this learner ends the run, export and evaluate too."""
        async with self._one_at_a_time:
            newest = self._newest
            if newest is None:
                return
            if newest.head.count > self._saved:
                await self._save(newest)
            if not finished:
                return
            await self._export(newest)
            if self._evaluation is not None:
                await until(stop, self._evaluation.done.wait())
            if self._evaluation is None or self._evaluation.clock != newest.head.clock:
                await self.evaluate(newest.head.clock, newest.version)
            if self._evaluation is not None:
                await until(stop, self._evaluation.done.wait())

    async def _save(self, newest: Committed) -> None:
        if await save_state(self._ring, self._store, self._offload, newest.head, newest.state):
            self._saved = newest.head.count
            self._kept("state", state_path(self._ring.spec, newest.head.learner, newest.head.count))

    async def _export(self, newest: Committed) -> None:
        path = await export(self._ring, self._store, self._offload, newest.head, newest.policy)
        self._kept("export", path)
        self._exported = newest.head.count
