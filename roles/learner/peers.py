"""The peers of a learner: how many learners live, which of them evaluates, and whether the run is over."""

from __future__ import annotations

import asyncio

from protocol.codec import decode
from protocol.errors import BusError, DecodeError
from protocol.messages import NodeState
from protocol.subjects import FINISHED_KEY, Bucket
from roles.ring import Ring, nap

PEERS_POLL_S = 5.0


class Peers:
    """What presence tells a learner."""

    def __init__(self, ring: Ring) -> None:
        """Alone until ``run`` has looked."""
        self._ring = ring
        self.learners = frozenset({ring.identity.node})
        """Live learners, this one included."""
        self.states: list[NodeState] | None = None
        """Presence of every live node; None while it cannot be read."""
        self.over = asyncio.Event()
        """Set once somebody has marked the run as finished."""
        self.changed = asyncio.Event()
        """Set whenever a look has ended."""

    @property
    def count(self) -> int:
        """Live learners, this one included."""
        return len(self.learners)

    @property
    def finished(self) -> bool:
        """Whether somebody has marked the run as finished."""
        return self.over.is_set()

    @property
    def leads(self) -> bool:
        """Whether this learner is the one that evaluates and ends the run: verdicts of evaluations come
        through a queue that learners share, so there is one at a time."""
        return min(self.learners) == self._ring.identity.node

    async def run(self) -> None:
        """Look around for ever; cancel to stop."""
        while True:
            await self.look()
            await self._ring.clock.sleep(PEERS_POLL_S)

    async def look(self) -> None:
        """Read presence once; a failure leaves what was known."""
        bus = self._ring.bus
        try:
            states = await bus.list(Bucket.NODE, "node")
            if await bus.get(Bucket.RUN, FINISHED_KEY) is not None:
                self.over.set()
        except BusError as exc:
            self._ring.log.warning("peers_unread", error=str(exc) or type(exc).__name__)
            self.states = None
            return
        found: list[NodeState] = []
        for entry in states.values():
            try:
                found.append(decode(entry.value).expect(NodeState))
            except DecodeError as exc:
                self._ring.log.warning("presence_unreadable", key=entry.key, error=str(exc))
        self.states = found
        learners = {state.node for state in found if "learner" in state.roles}
        self.learners = frozenset({self._ring.identity.node, *learners})
        self.changed.set()

    async def until_leading(self, stop: asyncio.Event) -> None:
        """Wait until this learner leads, or the run is finished, or ``stop``."""
        while not (self.leads or self.finished or stop.is_set()):
            await nap(self._ring.clock, PEERS_POLL_S, self.changed)
