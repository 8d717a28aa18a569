"""The policy follower: keeps a peer at the newest policy, in the background.

    announcement (or slow poll) ─▶ heads ─▶ fetch missing updates ─▶ compose ─▶ verify digest ─▶ on_policy

Nothing here pauses anybody: until a newer policy is whole and verified, the previous one stays. An
update that cannot be verified is reported with its reason and never used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocol.clock import VectorClock
from protocol.errors import BusError, StoreError
from roles.policy.policies import Policies, PolicyVersion
from roles.ring import Ring, nap

POLL_S = 15.0
"""Anti-entropy: how often heads are read even without an announcement."""

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
        self.current: PolicyVersion | None = None

    async def run(self) -> None:
        """Follow heads for ever. Raises StoreError only if genesis itself is unusable."""
        await self._policies.start()
        listener = asyncio.create_task(self._listen())
        try:
            while True:
                await self._advance()
                await nap(self._ring.clock, POLL_S, self._wake)
        finally:
            listener.cancel()

    async def reach(self, clock: VectorClock) -> PolicyVersion:
        """Wait until the current policy contains ``clock``."""
        self._wake.set()
        async with self._changed:
            while self.current is None or not clock <= self.current.clock:
                await self._changed.wait()
            return self.current

    async def _advance(self) -> None:
        try:
            target = await self._policies.read_heads()
            if self.current is not None and not self.current.clock < target:
                return
            newer = await self._policies.at(target)
        except BusError as exc:
            self._ring.log.warning("heads_unread", error=str(exc) or type(exc).__name__)
            return
        except StoreError as exc:
            await self._ring.tell("update_rejected", reason=str(exc), kind=type(exc).__name__)
            return
        await self._on_policy(newer)
        async with self._changed:
            self.current = newer
            self._changed.notify_all()

    async def _listen(self) -> None:
        async for entry in self._ring.bus.announcements():
            self._policies.note(entry)
            self._wake.set()
