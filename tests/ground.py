"""What a role's tests stand on: one in-memory broker and bucket under virtual time, and nodes on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from node.entry_cache import EntryCache
from node.memory_broker import MemoryBroker, MemoryRun
from node.memory_bus import MemoryBus
from node.memory_store import Faults, MemoryBucket, MemoryStore, no_faults
from node.virtual_time import VirtualClock
from protocol.clock import GENESIS, VectorClock
from protocol.codec import decode_as, encode
from protocol.errors import BackPressure, BrokerAbsent, UnknownOutcome
from protocol.identity import Identity
from protocol.manifest import EntryKind, Manifest
from protocol.messages import DeadLetter, Event, Head
from protocol.ports import Delivery, Write
from protocol.runspec import RunSpec
from protocol.subjects import GENESIS_KEY, Bucket, Queue, head_key
from roles.learner.buffer import Candidate
from roles.learner.fake_policy import FakePolicy
from roles.learner.lease import Lease
from roles.policy import norm_bound
from roles.policy.chains import PREVIOUS
from roles.policy.compose import UPDATE_FILE, WEIGHTS_FILE, Factors, compose, factors_digest
from roles.policy.peft_export import factors_bytes
from roles.ring import Ring
from tests.build import a_group, a_runspec, a_task, a_verified_group

T = TypeVar("T")


class Fault(Enum):
    """What can happen to one commit."""

    ABSENT = "nothing happens, and the node knows"
    LOST = "nothing happens, and the node does not know"
    LANDED = "it takes effect, and the node does not know"


class FaultyBus(MemoryBus):
    """A MemoryBus with faults on demand."""

    away = False
    """The broker does not answer."""
    full = False
    """Queues take nothing more."""

    def __init__(self, broker: MemoryBroker, run: str, *, node: str) -> None:
        super().__init__(broker, run, node=node)
        self.commit_faults: deque[Fault | None] = deque()
        self.commits = 0
        self.may_commit = asyncio.Event()
        self.may_commit.set()

    async def ask(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request."""
        await asyncio.sleep(0)
        if self.away:
            raise BrokerAbsent("the broker is away")
        return await super().ask(effect)

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        """Store a message."""
        if self.full:
            raise BackPressure("the queue is full")
        await super().publish(queue, data, message_id)

    async def commit(self, bucket: Bucket, writes: Sequence[Write]) -> int:
        """All writes or none."""
        await self.may_commit.wait()
        self.commits += 1
        fault = self.commit_faults.popleft() if self.commit_faults else None
        if fault is Fault.ABSENT:
            raise BrokerAbsent("the broker is away")
        if fault is Fault.LOST:
            raise UnknownOutcome("no answer")
        revision = await super().commit(bucket, writes)
        if fault is Fault.LANDED:
            raise UnknownOutcome("no answer")
        return revision


class Ground:
    """A broker and a bucket with one run."""

    def __init__(self, directory: Path, spec: RunSpec | None = None) -> None:
        self.spec = spec or a_runspec()
        self.clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        self.broker.create(self.spec, 1000)
        self.bucket = MemoryBucket()
        self._directory = directory
        self._stores = 0
        self._committed: dict[str, Head] = {}

    @property
    def run(self) -> MemoryRun:
        """The broker's state of the run."""
        return self.broker.run(self.spec.name)

    @property
    def events(self) -> list[Event]:
        """Telemetry so far."""
        return [decode_as(frame, Event) for frame in self.run.events]

    def told(self, name: str) -> list[dict[str, object]]:
        """Fields of every event of a name."""
        return [dict(event.fields) for event in self.events if event.name == name]

    @property
    def dead(self) -> list[DeadLetter]:
        """Dead letters so far."""
        return [decode_as(frame, DeadLetter) for frame in self.run.dead]

    def bus(self, node: str = "learner-1") -> FaultyBus:
        """A node's bus."""
        return FaultyBus(self.broker, self.spec.name, node=node)

    def ring(self, node: str = "learner-1", bus: FaultyBus | None = None, role: str = "learner") -> Ring:
        """A role's voice."""
        return Ring(bus or self.bus(node), Identity.deterministic(node), self.spec, role, self.clock)

    def store(self, faults: Faults = no_faults) -> MemoryStore:
        """A node's own view of the bucket."""
        self._stores += 1
        cache = EntryCache(self._directory / f"store-{self._stores}")
        return MemoryStore(self.bucket, cache, self.clock, timeout_s=1.0, faults=faults)

    async def offload(self, work: Callable[[], T]) -> T:
        """In line, after letting others run."""
        await asyncio.sleep(0)
        return work()

    async def claim_genesis(self) -> Factors:
        """Store and claim a genesis; returns its factors."""
        factors = FakePolicy().genesis(self.spec.seed)
        digest = factors_digest(factors)
        path = f"{self.spec.name}/genesis/{digest[:16]}"
        await self.publish(
            path, EntryKind.GENESIS, {WEIGHTS_FILE: factors_bytes(factors)}, policy_digest=digest
        )
        await self.bus().put(Bucket.RUN, GENESIS_KEY, f"{path} {digest}".encode())
        return factors

    async def publish(self, path: str, kind: EntryKind, files: dict[str, bytes], **fields: object) -> None:
        """Store a signed entry."""
        author = str(fields.pop("author", "learner-1"))
        values: dict[str, object] = {"path": path, "kind": kind, "run": self.spec.name, "author": author}
        manifest = Manifest.model_validate(values | {"files": Manifest.describe(files)} | fields)
        await self.store().publish(manifest.signed(Identity.deterministic(author)), files)

    async def commit_update(
        self,
        genesis: Factors,
        count: int,
        *,
        learner: str = "learner-1",
        weight: float | None = None,
        data: bytes | None = None,
        peers: dict[str, int] | None = None,
        step_norm: float | None = None,
    ) -> Head:
        """Store update ``count`` (every entry ``count``) and commit its head; its clock has ``peers`` too.

        The manifest records the norm of its step, unless another is given.
        """
        update = an_update(genesis, count)
        counts = {**(peers or {}), learner: count}
        clock = VectorClock.of(counts)
        digest = factors_digest(compose(genesis, {who: an_update(genesis, n) for who, n in counts.items()}))
        path = f"{self.spec.name}/updates/{learner}/{count}-test"
        key = head_key(learner)
        before = self._committed.get(learner)
        previous = before.path if before else ""
        total = float(count) if weight is None else weight
        if step_norm is None:
            started = (an_update(genesis, before.count), before.weight) if before else (None, 0.0)
            step_norm = norm_bound.step_norm(update, started[0], total - started[1])
        await self.publish(
            path,
            EntryKind.UPDATE,
            {UPDATE_FILE: factors_bytes(update) if data is None else data},
            author=learner,
            clock=clock,
            count=count,
            weight=total,
            version=total,
            step_norm=step_norm,
            policy_digest=digest,
            extra={PREVIOUS: previous} if previous else {},
        )
        head = Head(
            run=self.spec.name,
            learner=learner,
            count=count,
            clock=clock,
            weight=total,
            path=path,
            policy_digest=digest,
            nonce=f"{learner}-{count}",
        )
        await self.bus(learner).put(Bucket.POLICY, key, encode(head, Identity.deterministic(learner)))
        self._committed[learner] = head
        return head


def an_update(genesis: Factors, count: int) -> Factors:
    """A cumulative update whose every entry is ``count``."""
    return {name: np.full_like(tensor, count) for name, tensor in genesis.items()}


class Handed:
    """A delivery that nobody sent, which remembers how it was settled."""

    def __init__(self, data: bytes = b"", deliveries: int = 1) -> None:
        self.data = data
        self.deliveries = deliveries
        self.said: list[str] = []

    async def ack(self) -> None:
        self.said.append("ack")

    async def release(self, delay_s: float = 0.0) -> None:
        self.said.append("release")

    async def reject(self) -> None:
        self.said.append("reject")

    async def in_progress(self) -> None:
        self.said.append("in_progress")

    def free(self) -> None:
        self.said.append("free")


def a_candidate(
    group_id: str = "learner-1.0",
    *,
    clock: VectorClock = GENESIS,
    version: float | None = None,
    rewards: Iterable[float | None] = (1.0, 0.0),
    delivery: Delivery | None = None,
) -> Candidate:
    """A verified group in hand, sampled at ``clock``; its version is the sum of the counts unless given."""
    scores = tuple(rewards)
    task = a_task(group_id=group_id, clock=clock, group_size=len(scores))
    group = a_group(task)
    age = float(sum(count for _, count in clock)) if version is None else version
    return Candidate(task, group, a_verified_group(group, scores), Lease(delivery or Handed()), age)


class Loop(Protocol):
    """A part of a role that runs for ever."""

    async def run(self) -> None: ...


@contextlib.asynccontextmanager
async def running(*parts: Loop) -> AsyncIterator[None]:
    """Run parts while the body does; raises what one of them raises."""
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(part.run()) for part in parts]
        yield
        for loop in loops:
            loop.cancel()
