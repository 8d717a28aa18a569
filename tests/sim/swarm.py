"""A whole swarm in one process: real roles in real nodes, on the in-memory broker and store.

The world is small on purpose: seven tokens, prompts of two, and a reward for an even sum of tokens, so
that a fake engine's random completions earn it about every second time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from node.entry_cache import EntryCache
from node.memory_broker import MemoryBroker, MemoryRun
from node.memory_bus import MemoryBus
from node.memory_store import Faults, MemoryBucket, MemoryStore, no_faults
from node.node import Node, Part
from node.presence import Presence
from node.virtual_time import VirtualClock
from protocol.clock import VectorClock
from protocol.codec import decode_as
from protocol.errors import BrokerAbsent
from protocol.identity import Identity
from protocol.messages import RolloutGroup
from protocol.ports import Clock, Write
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue
from roles.learner.fake_policy import SHAPES, FakePolicy
from roles.learner.learner import Learner
from roles.policy.compose import Factors, factors_digest
from roles.ring import Ring, cancelled
from roles.sampler.fake_engine import FakeEngine
from roles.sampler.sampler import Sampler
from roles.tasks.prompts import Prompt
from roles.tasks.taskset import Row, TaskSet
from roles.verifier.checks import Rules
from roles.verifier.rewards.scorer import Scorer
from roles.verifier.verifier import TextDecoder, Verifier
from tests.build import a_runspec

T = TypeVar("T")

EOS_ID = 2
VOCAB = 7
STEP_S = 0.2
"""What a learner's heavy work takes."""


def a_small_run(seed: int = 0, **changes: dict[str, Any]) -> RunSpec:
    """A run of eight updates with four groups of four each; ``changes`` override within its tables."""
    tables: dict[str, dict[str, Any]] = {
        "sampling": {"group_size": 4, "max_new_tokens": 3, "ack_wait_s": 3.0, "deadline_s": 20.0},
        "learner": {"updates": 8, "groups_per_update": 4, "state_every": 2, "export_every": 5},
        "staleness": {"max_staleness": 4},
        "eval": {"every": 4, "problems": 3},
    }
    return a_runspec(seed=seed, **{name: table | changes.get(name, {}) for name, table in tables.items()})


def some_tasks(unanswered: int = 0) -> TaskSet:
    """Sixteen rows to train on, four to evaluate on; the first ``unanswered`` cannot be scored."""
    answers = ["" if number < unanswered else "even" for number in range(20)]
    rows = [Row(str(number), answer, f"row {number}") for number, answer in enumerate(answers)]
    return TaskSet(rows[:16], rows[16:], (), "digest")


def prompt_token_ids(row: Row) -> list[int]:
    """Two digits to base 4, as tokens 3 to 6."""
    return [3 + int(row.prompt) // 4 % 4, 3 + int(row.prompt) % 4]


class Parity:
    """Decodes to the word that the reward looks for."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """``even`` or ``odd``, by the sum of the tokens."""
        return "odd" if sum(token_ids) % 2 else "even"


@dataclass
class Seen:
    """What an observer saw that no role tells."""

    clocks: dict[str, set[VectorClock]] = field(default_factory=dict)
    """Clocks under which copies of a group were sampled, by group id."""
    digests: dict[str, set[str]] = field(default_factory=dict)
    """Digests of the weights that engines got under a name."""


class SimBus(MemoryBus):
    """One node's bus, with an observer and faults on demand."""

    def __init__(self, world: World, node: str) -> None:
        super().__init__(world.broker, world.spec.name, node=node)
        self._world = world
        self.before_commit: Callable[[Sequence[Write]], Awaitable[None]] | None = None
        """Awaited before a commit is sent; one that never returns is a commit that never happens."""

    async def ask(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request, unless the broker is away."""
        await asyncio.sleep(0)
        if self._world.broker_is_away:
            raise BrokerAbsent("the broker is away")
        return await super().ask(effect)

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        """Store a message."""
        if queue is Queue.ROLLOUT:
            group = decode_as(data, RolloutGroup)
            self._world.seen.clocks.setdefault(group.group_id, set()).add(group.clock)
        await super().publish(queue, data, message_id)

    async def commit(self, bucket: Bucket, writes: Sequence[Write]) -> int:
        """All writes or none."""
        if self.before_commit is not None:
            await self.before_commit(writes)
        return await super().commit(bucket, writes)


class SeenEngine(FakeEngine):
    """A FakeEngine that shows what it was given."""

    def __init__(self, world: World, **settings: Any) -> None:
        shapes: Factors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        super().__init__(shapes, world.clock, eos_ids=(EOS_ID,), vocab_size=VOCAB, **settings)
        self._world = world

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Check and remember a policy."""
        self._world.seen.digests.setdefault(name, set()).add(factors_digest(factors))
        await super().load_policy(name, factors, newest=newest)


@dataclass
class Peer:
    """One running node."""

    name: str
    bus: SimBus
    stop: asyncio.Event
    work: asyncio.Task[None]

    async def crash(self) -> None:
        """Kill -9: from now on nothing of this node reaches anybody."""
        await self.bus.close()
        await cancelled(self.work)

    async def drain(self) -> None:
        """SIGTERM: returns when the node has left. Raises what ended it."""
        self.stop.set()
        await self.work


class World:
    """Broker, bucket, and whoever plays in it. Made inside a simulation."""

    def __init__(
        self, spec: RunSpec, directory: Path, *, tasks: TaskSet | None = None, faults: Faults = no_faults
    ) -> None:
        self.spec = spec
        self.clock: Clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        self.bucket = MemoryBucket()
        self.seen = Seen()
        self.tasks = tasks or some_tasks()
        self.broker_is_away = False
        self.decoder: TextDecoder = Parity()
        self.misread: set[str] = set()
        """Prompts that the verifier has other tokens for: their groups end as dead letters."""
        self.policies: list[FakePolicy] = []
        """Of each learner process, in the order of their starts."""
        self._directory = directory
        self._faults = faults
        self._stores = 0
        self._started = 0

    async def create(self) -> None:
        """Create the run."""
        await SimBus(self, "creator").create_run(self.spec)

    async def restart_broker(self, away_s: float) -> None:
        """Nobody reaches the broker for a while; then it has forgotten what it may forget."""
        self.broker_is_away = True
        await self.clock.sleep(away_s)
        for queue in self.broker.run(self.spec.name).queues.values():
            queue.forget_ids()
        self.broker_is_away = False

    def learner(self, name: str = "learner-1", *, identity: Identity | None = None) -> Peer:
        """Start a learner, with the key that belongs to its name unless another ``identity`` is given."""

        def part(ring: Ring, store: MemoryStore) -> Part:
            policy = FakePolicy()
            self.policies.append(policy)
            train, held_out = (self._prompts(rows) for rows in (self.tasks.train, self.tasks.held_out))
            learner = Learner(
                ring,
                store,
                policy,
                offload=self._offload,
                aside=self._offload,
                train=train,
                held_out=held_out,
            )
            return Part(
                "learner",
                learner.run,
                lambda: learner.clock,
                lambda: learner.busy,
                _nothing,
                lambda: learner.needs,
            )

        return self._start(name, "learner", part, identity)

    def sampler(self, name: str, **engine: Any) -> Peer:
        """Start a sampler; ``engine`` are a FakeEngine's settings."""

        def part(ring: Ring, store: MemoryStore) -> Part:
            fake = SeenEngine(self, **({"seconds_per_token": 0.05} | engine))
            sampler = Sampler(ring, store, fake, self._offload)
            return Part("sampler", sampler.run, lambda: sampler.clock, lambda: sampler.busy, fake.close)

        return self._start(name, "sampler", part)

    def verifier(self, name: str = "verifier-1") -> Peer:
        """Start a verifier."""

        def part(ring: Ring, _store: MemoryStore) -> Part:
            rules = Rules(frozenset({EOS_ID}), VOCAB, self.tasks, self._as_the_verifier_reads_it)
            verifier = Verifier(ring, rules, self.decoder, Scorer(self.spec.rewards))
            return Part("verifier", verifier.run, VectorClock, lambda: verifier.busy, _nothing)

        return self._start(name, "verifier", part)

    def store(self) -> MemoryStore:
        """The bucket as one more node sees it."""
        self._stores += 1
        cache = EntryCache(self._directory / f"store-{self._stores}")
        return MemoryStore(self.bucket, cache, self.clock, timeout_s=1.0, faults=self._faults)

    def _start(
        self,
        name: str,
        role: str,
        part: Callable[[Ring, MemoryStore], Part],
        identity: Identity | None = None,
    ) -> Peer:
        bus, store = SimBus(self, name), self.store()
        identity = identity or Identity.deterministic(name)
        self._started += 1
        numbers = itertools.count()
        process = self._started
        ring = Ring(bus, identity, self.spec, role, self.clock, lambda: f"{name}-{process}-{next(numbers)}")
        presence = Presence(Ring(bus, identity, self.spec, "node", self.clock), (role,), {})
        stop = asyncio.Event()
        node = Node(ring, presence, [part(ring, store)])
        return Peer(name, bus, stop, asyncio.create_task(node.run(stop), name=name))

    async def _offload(self, work: Callable[[], T]) -> T:
        await self.clock.sleep(STEP_S)
        return work()

    def _as_the_verifier_reads_it(self, row: Row) -> list[int]:
        return [] if row.prompt in self.misread else prompt_token_ids(row)

    def _prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        return [Prompt(i, np.array(prompt_token_ids(row), np.int32)) for i, row in enumerate(rows)]


async def _nothing() -> None:
    """There is nothing to close."""
