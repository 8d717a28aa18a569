"""The merger: fetches peers' newer updates in the background; the loop merges between steps what is here.

    announcement (or slow poll) ─▶ heads ─▶ fetch and verify, one learner beside the other ─▶ ``take``

A store that is slow for this learner, or one peer's update that cannot be used, holds up no step. What is
refused is told once, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from protocol.clock import VectorClock
from protocol.errors import BusError, StoreError
from roles.learner.witness import Witness
from roles.policy.follower import POLL_S
from roles.policy.policies import Policies, Update
from roles.policy.refusals import Refusals
from roles.ring import RETRY_MAX_S, Ring, nap

CATCH_UP_TRIES = 12
"""A minute: a store that is away for longer ends a learner that begins."""

Fetch = Callable[[], Awaitable[Update]]


class Merger:
    """Peers' updates that this learner has not merged yet."""

    def __init__(
        self,
        ring: Ring,
        policies: Policies,
        witness: Witness,
        merged: Callable[[], VectorClock],
        arrived: asyncio.Event,
    ) -> None:
        """``witness`` is told of heads that the broker lost; ``merged`` gives the clock of what the learner
        holds; ``arrived`` is set when there is more.

        Nothing is fetched before ``run``.
        """
        self._ring = ring
        self._policies = policies
        self._merged = merged
        self._arrived = arrived
        self._fetched: dict[str, Update] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._refusals = Refusals(ring)
        self._witness = witness
        self.wake = asyncio.Event()
        """Set it to make the merger look at the heads soon."""

    async def catch_up(self, known: VectorClock) -> list[Update]:
        """Where a learner begins: the newest update of every peer, as far as it can be had, and nothing older
        than in ``known``, the clock of its own last update. Raises StoreError if that is not to be had."""
        updates = []
        for learner, count in await self._ring.persist(self._policies.read_heads):
            if learner == self._ring.identity.node:
                continue
            newest = partial(self._policies.update, learner, count)
            before = partial(self._policies.update, learner, known[learner])
            try:
                updates.append(await (self._either(newest, before) if known[learner] else newest()))
            except StoreError as exc:
                await self._refusals.tell(f"{learner}:{count}", exc)
                if known[learner]:
                    raise
        return updates

    async def _either(self, newest: Fetch, before: Fetch) -> Update:
        """The first if it can be had, else the second; tries both for a while."""
        for _ in range(CATCH_UP_TRIES):
            with suppress(StoreError):
                return await newest()
            with suppress(StoreError):
                return await before()
            await self._ring.pause(RETRY_MAX_S)
        return await newest()

    def take(self, clock: VectorClock) -> list[Update]:
        """Fetched updates that ``clock`` lacks, by learner; the caller merges them."""
        taken = [update for _, update in sorted(self._fetched.items())]
        self._fetched.clear()
        return [update for update in taken if update.manifest.count > clock[update.manifest.author]]

    async def run(self) -> None:
        """Follow the peers for ever; cancel to stop."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._policies.listen(self.wake))
            while True:
                try:
                    await self._policies.read_heads()
                    await self._witness.testify(self._policies.lost)
                except BusError as exc:
                    self._ring.log.warning("heads_unread", error=str(exc) or type(exc).__name__)
                self._fetch_newer(group)
                await nap(self._ring.clock, POLL_S, self.wake)

    def _fetch_newer(self, group: asyncio.TaskGroup) -> None:
        for learner in self._policies.heads:
            at_work = learner in self._fetching and not self._fetching[learner].done()
            if learner != self._ring.identity.node and not at_work and self._lacks(learner):
                self._fetching[learner] = group.create_task(self._fetch(learner))

    def _lacks(self, learner: str) -> bool:
        fetched = self._fetched.get(learner)
        here = max(self._merged()[learner], fetched.manifest.count if fetched else 0)
        return self._policies.newest[learner] > here

    async def _fetch(self, learner: str) -> None:
        """Fetch a learner's newest update, and newer ones that appear meanwhile."""
        while self._lacks(learner):
            count = self._policies.newest[learner]
            try:
                self._fetched[learner] = await self._policies.update(learner, count)
            except StoreError as exc:
                await self._refusals.tell(f"{learner}:{count}", exc)
                await self._ring.pause(RETRY_MAX_S)
            else:
                self._arrived.set()
