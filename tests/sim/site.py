"""What a simulated node stands on: its bus, its store and its clock, each with an observer behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from node.memory_broker import MemoryBroker, MemoryRun
from node.memory_bus import MemoryBus
from node.memory_store import MemoryStore
from protocol.clock import VectorClock
from protocol.codec import decode_as
from protocol.errors import BrokerAbsent
from protocol.messages import RolloutGroup
from protocol.ports import Clock, Write
from protocol.subjects import Bucket, Queue
from roles.learner.fake_policy import SHAPES
from roles.policy.compose import Factors, factors_digest
from roles.sampler.fake_engine import FakeEngine

T = TypeVar("T")

STEP_S = 0.2
"""What a learner's heavy work takes."""


@dataclass
class Seen:
    """What an observer saw that no role tells."""

    clocks: dict[str, set[VectorClock]] = field(default_factory=dict)
    """Clocks under which copies of a group were sampled, by group id."""
    digests: dict[str, set[str]] = field(default_factory=dict)
    """Digests of the weights that engines got under a name."""


class SimBus(MemoryBus):
    """One node's bus, with an observer and faults on demand."""

    def __init__(
        self, broker: MemoryBroker, run: str, node: str, seen: Seen, broker_is_away: Callable[[], bool]
    ) -> None:
        super().__init__(broker, run, node=node)
        self._seen = seen
        self._broker_is_away = broker_is_away
        self.before_commit: Callable[[Sequence[Write]], Awaitable[None]] | None = None
        """Awaited before a commit is sent; one that never returns is a commit that never happens."""

    async def ask(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request, unless the broker is away."""
        await asyncio.sleep(0)
        if self._broker_is_away():
            raise BrokerAbsent("the broker is away")
        return await super().ask(effect)

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        """Store a message."""
        if queue is Queue.ROLLOUT:
            group = decode_as(data, RolloutGroup)
            self._seen.clocks.setdefault(group.group_id, set()).add(group.clock)
        await super().publish(queue, data, message_id)

    async def commit(self, bucket: Bucket, writes: Sequence[Write]) -> int:
        """All writes or none."""
        if self.before_commit is not None:
            await self.before_commit(writes)
        return await super().commit(bucket, writes)


class SeenEngine(FakeEngine):
    """A FakeEngine that shows what it was given."""

    def __init__(self, seen: Seen, clock: Clock, **settings: Any) -> None:
        shapes: Factors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        super().__init__(shapes, clock, **settings)
        self._seen = seen

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Check and remember a policy."""
        self._seen.digests.setdefault(name, set()).add(factors_digest(factors))
        await super().load_policy(name, factors, newest=newest)


@dataclass
class Site:
    """What one process stands on."""

    bus: SimBus
    store: MemoryStore
    clock: Clock

    async def offload(self, work: Callable[[], T]) -> T:
        """Heavy work, in line; it takes its time."""
        await self.clock.sleep(STEP_S)
        return work()

    def kill(self) -> None:
        """The process is gone without a word."""
        self.bus.crash()
