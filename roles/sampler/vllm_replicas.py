"""Servers that serve the same policies, and which of them takes the next request.

A request goes whole to one server, where its rollouts share the prompt's cache. Requests wait here, in order
of arrival, rather than in the server: until it starts, a rollout belongs to no policy.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from roles.sampler.vllm_adapters import Adapters
from roles.sampler.vllm_client import VllmClient
from roles.sampler.vllm_server import VllmServer


@dataclass(eq=False, slots=True)
class Replica:
    """One server and what it holds."""

    client: VllmClient
    server: VllmServer
    adapters: Adapters
    rows: int = 0
    """Rollouts that it generates now."""


class Replicas:
    """All servers of an engine."""

    def __init__(self, replicas: Sequence[Replica], rows_max: int) -> None:
        """``rows_max`` bounds the rollouts that one server generates together."""
        self.all = tuple(replicas)
        self.rows_max = rows_max
        self._waiting: deque[tuple[int, asyncio.Future[Replica]]] = deque()
        for replica in self.all:
            replica.server.on_change = self._assign

    @property
    def living(self) -> list[Replica]:
        """Those whose server lives."""
        return [replica for replica in self.all if replica.server.life is not None]

    async def take(self, rows: int) -> Replica:
        """Wait for room for ``rows`` rollouts; give it back with ``give``. More than fit go alone.

        Raises OperatorError once no server will ever live again.
        """
        place: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        # Whoever only wants to know that a server lives is not in anybody's way.
        (self._waiting.append if rows else self._waiting.appendleft)((rows, place))
        self._assign()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.give(place.result(), rows)
            self._assign()
            raise

    def give(self, replica: Replica, rows: int) -> None:
        """Room for others."""
        replica.rows -= rows
        self._assign()

    async def any_living(self) -> list[Replica]:
        """Wait until at least one server lives. Raises like ``take``."""
        while not (living := self.living):
            self.give(await self.take(0), 0)
        return living

    def _assign(self) -> None:
        faults = [replica.server.fault for replica in self.all if replica.server.fault is not None]
        if len(faults) == len(self.all):
            for _, place in self._waiting:
                if not place.done():
                    place.set_exception(faults[0])
            self._waiting.clear()
        while self._waiting:
            rows, place = self._waiting[0]
            if not place.done():
                room = [r for r in self.living if not r.rows or not rows or r.rows + rows <= self.rows_max]
                if not room:
                    return
                chosen = min(room, key=lambda replica: replica.rows)
                chosen.rows += rows
                place.set_result(chosen)
            self._waiting.popleft()
