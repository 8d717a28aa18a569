"""A node: the roles it plays, its presence, and its end.

Every role is one coroutine that returns when the stop event is set. Roles do not know each other, nor
the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from node.presence import Doing, Presence
from protocol.clock import VectorClock
from roles.ring import Ring


@dataclass(frozen=True, slots=True)
class Part:
    """One role of a node: its loop, what presence tells of it, and what it must close."""

    role: str
    run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    clock: Callable[[], VectorClock]
    busy: Callable[[], int]
    close: Callable[[], Coroutine[Any, Any, None]]
    needs: Callable[[], tuple[VectorClock, ...]] = tuple
    """Policies besides its clock that it may still ask the store for."""


class Node:
    """All roles of one process."""

    def __init__(self, ring: Ring, presence: Presence, parts: Sequence[Part]) -> None:
        """``ring`` speaks for the node itself."""
        self._ring = ring
        self._presence = presence
        self._parts = parts

    async def run(self, stop: asyncio.Event) -> None:
        """Play all roles until ``stop`` is set or the run is finished, then leave in order."""
        left = asyncio.Event()

        def on_finished() -> None:
            # A learner ends by itself: it still evaluates what it finished.
            if not stop.is_set() and not any(part.role == "learner" for part in self._parts):
                self._ring.log.info("run_is_finished")
                stop.set()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._presence.run(left, self._now, on_finished))
                try:
                    async with asyncio.TaskGroup() as roles:
                        for part in self._parts:
                            roles.create_task(self._play(part, stop))
                finally:
                    left.set()
        finally:
            for part in self._parts:
                await part.close()
            await self._ring.bus.close()

    async def _play(self, part: Part, stop: asyncio.Event) -> None:
        await self._ring.tell("role_started", played=part.role)
        await part.run(stop)
        await self._ring.tell("role_stopped", played=part.role)
        if part.role == "learner":
            stop.set()  # a learner ends when the run does, or with the node

    def _now(self) -> Doing:
        clock = VectorClock()
        for part in self._parts:
            clock = clock.join(part.clock())
        needs = tuple(needed for part in self._parts for needed in part.needs())
        return Doing(clock, sum(part.busy() for part in self._parts), needs)
