"""Presence: a node says that it lives, and learns who else does.

Presence expires by itself when a node no longer renews it. What a node knows of its peers here is
their keys, by which signatures are checked.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from dataclasses import dataclass

from protocol.clock import VectorClock
from protocol.codec import decode, encode
from protocol.errors import BusError, DecodeError
from protocol.messages import NodeState
from protocol.subjects import FINISHED_KEY, Bucket, node_key
from roles.ring import Ring, until

RENEW_S = 3.0
TTL_S = 12
"""A node that says nothing for this long is taken for dead."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a node tells of its work."""

    clock: VectorClock
    """Newest policy held."""
    busy: int = 0
    """Groups in hand."""
    needs: tuple[VectorClock, ...] = ()
    """Other policies that it may still ask the store for."""


class Presence:
    """One node's own presence and what it sees of the others'."""

    def __init__(self, ring: Ring, roles: tuple[str, ...], detail: dict[str, str]) -> None:
        """``detail`` is shown to people (device, threads…)."""
        self._ring = ring
        self._roles = roles
        self._detail = detail
        self._keys: dict[str, str] = {}
        self._started = ring.clock.wall()

    def key_of(self, node: str) -> str | None:
        """The public key of a node that has shown itself, or None."""
        return self._keys.get(node)

    async def run(
        self, left: asyncio.Event, now: Callable[[], Doing], on_finished: Callable[[], None]
    ) -> None:
        """Be present until ``left``. Calls ``on_finished`` while the run is marked as finished."""
        key = node_key(self._ring.identity.node)
        while not left.is_set():
            try:
                state = encode(self._state(now()), self._ring.identity)
                await self._ring.bus.put(Bucket.NODE, key, state, ttl_s=TTL_S)
                await self._look_around()
                if await self._ring.bus.get(Bucket.RUN, FINISHED_KEY) is not None:
                    on_finished()
            except BusError as exc:
                self._ring.log.warning("presence_unsent", error=str(exc) or type(exc).__name__)
            await until(left, self._ring.clock.sleep(RENEW_S))
        try:
            await self._ring.bus.delete(Bucket.NODE, key)
        except BusError:
            self._ring.log.info("presence_expires_by_itself")

    async def _look_around(self) -> None:
        for entry in (await self._ring.bus.list(Bucket.NODE, "node")).values():
            try:
                signed = decode(entry.value)
                state = signed.expect(NodeState)
            except DecodeError as exc:
                self._ring.log.warning("presence_unreadable", key=entry.key, error=str(exc))
                continue
            if signed.signer == state.public_key and entry.key == node_key(state.node):
                self._keys[state.node] = state.public_key

    def _state(self, doing: Doing) -> NodeState:
        return NodeState(
            run=self._ring.spec.name,
            node=self._ring.identity.node,
            roles=self._roles,
            public_key=self._ring.identity.public_key,
            host=platform.node(),
            started_at=self._started,
            clock=doing.clock,
            busy=doing.busy,
            needs=doing.needs,
            detail=self._detail,
        )
