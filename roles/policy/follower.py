"""The policy follower: keeps a peer at the newest policy, in the background.

    announcement (or slow poll) ─▶ heads ─▶ fetch missing updates ─▶ compose ─▶ verify digest ─▶ on_policy

Nothing here pauses anybody: until a newer policy is whole and verified, the previous one stays. An
update that cannot be verified is reported with its reason and never used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocol.clock import VectorClock
from protocol.errors import BusError, EngineError, StoreCorrupt, StoreError
from roles.policy.policies import Policies, PolicyVersion
from roles.ring import Ring, cancelled, nap

POLL_S = 15.0
"""Anti-entropy: how often heads are read even without an announcement."""

RETRY_S = 1.0
"""How soon heads are read again when broker or store could not be asked."""

OnPolicy = Callable[[PolicyVersion], Awaitable[None]]


class PolicyFollower:
    """One peer's newest policy."""

    def __init__(self, ring: Ring, policies: Policies, on_policy: OnPolicy) -> None:
        """``on_policy`` is awaited with every newer policy, the first one included."""
        self._ring = ring
        self._policies = policies
        self._on_policy = on_policy
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._refused: set[tuple[str, int]] = set()
        """Updates that can never be used, by learner and count; each was reported once."""
        self.current: PolicyVersion | None = None

    async def run(self) -> None:
        """Follow heads for ever. Raises StoreError or EngineError only if genesis itself is unusable."""
        await self._policies.start()
        listener = asyncio.create_task(self._listen())
        try:
            while True:
                settled = await self._advance()
                await nap(self._ring.clock, POLL_S if settled else RETRY_S, self._wake)
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
        """Move to the newest usable policy; returns whether everything could be asked."""
        try:
            heads = await self._policies.read_heads()
        except BusError as exc:
            self._ring.log.warning("heads_unread", error=str(exc) or type(exc).__name__)
            return False
        target, settled = await self._usable(heads)
        if self.current is not None and not self.current.clock < target:
            return settled
        try:
            newer = await self._policies.at(target)
            await self._on_policy(newer)
        except (StoreError, EngineError) as exc:
            if self.current is None and not target.counts:
                raise
            await self._ring.tell("update_rejected", reason=str(exc), kind=type(exc).__name__, clock=target.text)
            return False
        async with self._changed:
            self.current = newer
            self._changed.notify_all()
        return settled

    async def _usable(self, heads: VectorClock) -> tuple[VectorClock, bool]:
        """The part of ``heads`` whose updates are here and sound, and whether the rest is known to be bad.

        One learner's bad update must not keep this peer from following the others.
        """
        before = self.current.clock if self.current is not None else VectorClock()
        counts, settled = dict(before.counts), True
        for learner, count in heads:
            if count <= before[learner] or (learner, count) in self._refused:
                continue
            try:
                await self._policies.update(learner, count)
            except StoreError as exc:
                settled &= await self._refuse(learner, count, exc)
            else:
                counts[learner] = count
        return VectorClock.of(counts), settled

    async def _refuse(self, learner: str, count: int, why: StoreError) -> bool:
        """Report an update that could not be used; returns whether that is final."""
        final = isinstance(why, StoreCorrupt)
        if not final:
            self._ring.log.warning("update_delayed", learner=learner, count=count, reason=str(why))
            return False
        self._refused.add((learner, count))
        await self._ring.tell(
            "update_rejected", learner=learner, count=count, reason=str(why), kind=type(why).__name__
        )
        return True

    async def _listen(self) -> None:
        async for entry in self._ring.bus.announcements():
            self._policies.note(entry)
            self._wake.set()
