"""The policy follower: keeps a peer at the newest policy, in the background.

    announcement (or slow poll) ─▶ heads ─▶ fetch missing updates ─▶ compose ─▶ verify digest ─▶ on_policy

Nothing here pauses anybody: until a newer policy is whole and verified, the previous one stays. An
update that cannot be verified is reported with its reason and never used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from protocol.clock import GENESIS, VectorClock
from protocol.errors import BusError, EngineError, StoreError
from roles.policy.policies import Policies, PolicyVersion
from roles.policy.refusals import Refusals
from roles.ring import Ring, cancelled, nap

POLL_S = 15.0
"""Anti-entropy: how often heads are read even without an announcement."""

RETRY_FIRST_S = 0.5
"""How soon something is tried again that failed; twice as late each time, up to ``POLL_S``."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a newer policy came here, in seconds, one after the other."""

    waited_s: float
    """From hearing of it to beginning with it: an older one was on its way, or could not be had at once."""
    fetch_s: float
    """Reading the heads, then fetching and checking the updates that were lacking."""
    compose_s: float
    """Their sum, its digest, and whether that is the one its author signed."""


OnPolicy = Callable[[PolicyVersion, Arrival], Awaitable[None]]


class PolicyFollower:
    """One peer's newest policy."""

    def __init__(self, ring: Ring, policies: Policies, on_policy: OnPolicy) -> None:
        """``on_policy`` is awaited with every newer policy, the first one included."""
        self._ring = ring
        self._policies = policies
        self._on_policy = on_policy
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._refusals = Refusals(ring)
        self.current: PolicyVersion | None = None

    async def run(self) -> None:
        """Follow heads for ever. Raises StoreError or EngineError only if genesis itself is unusable."""
        await self._policies.start()
        listener = asyncio.create_task(self._policies.listen(self._wake))
        try:
            retry_s = RETRY_FIRST_S
            while True:
                whole = await self._advance()
                await nap(self._ring.clock, POLL_S if whole else retry_s, self._wake)
                retry_s = RETRY_FIRST_S if whole else min(2 * retry_s, POLL_S)
        finally:
            await cancelled(listener)

    async def reach(self, clock: VectorClock) -> PolicyVersion:
        """Wait until the current policy contains ``clock``."""
        self._wake.set()
        async with self._changed:
            while self.current is None or not clock <= self.current.clock:
                await self._changed.wait()
            return self.current

    async def _advance(self) -> bool:
        """Move to the newest usable policy; returns whether that is what the heads say."""
        begun = self._ring.clock.monotonic()
        try:
            heads = await self._policies.read_heads()
        except BusError as exc:
            self._ring.log.warning("heads_unread", error=str(exc) or type(exc).__name__)
            return False
        target = await self._usable(heads)
        if self.current is None or self.current.clock < target:
            try:
                fetched = self._ring.clock.monotonic()
                newer = await self._policies.at(target)
                await self._on_policy(newer, self._arrival(begun, fetched))
            except (StoreError, EngineError) as exc:
                if target == GENESIS:
                    raise
                await self._refusals.tell(target.text, exc)
                return False
            async with self._changed:
                self.current = newer
                self._changed.notify_all()
        return heads <= target

    def _arrival(self, begun: float, fetched: float) -> Arrival:
        """What lies behind a policy that is composed now."""
        heard = self._policies.heard_at
        waited_s = 0.0 if heard is None else max(0.0, begun - heard)
        return Arrival(waited_s, fetched - begun, self._ring.clock.monotonic() - fetched)

    async def _usable(self, heads: VectorClock) -> VectorClock:
        """The part of ``heads`` whose updates are here and sound: one learner's bad update must not keep
        this peer from following the others."""
        before = self.current.clock if self.current is not None else GENESIS
        counts = dict(before.counts)
        for learner, count in heads:
            if count > before[learner]:
                try:
                    await self._policies.update(learner, count)
                except StoreError as exc:
                    await self._refusals.tell(f"{learner}:{count}", exc)
                else:
                    counts[learner] = count
        return VectorClock.of(counts)
