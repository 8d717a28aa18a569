"""A whole swarm in one process: real roles in real nodes, on the in-memory broker and store.

The world is small on purpose: seven tokens, prompts of two, and a reward for an even sum of tokens, so
that a fake engine's random completions earn it about every second time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from node.entry_cache import EntryCache
from node.memory_broker import MemoryBroker
from node.memory_store import Faults, MemoryBucket, MemoryStore, no_faults
from node.node import Node, Part
from node.presence import Presence
from node.virtual_time import VirtualClock
from protocol.clock import VectorClock
from protocol.identity import Identity
from protocol.ports import Clock
from protocol.runspec import RunSpec
from roles.learner.fake_policy import FakePolicy
from roles.learner.learner import Learner
from roles.ring import Ring, cancelled
from roles.sampler.sampler import Sampler
from roles.tasks.prompts import Prompt
from roles.tasks.taskset import Row, TaskSet
from roles.verifier.checks import Rules
from roles.verifier.rewards.scorer import Scorer
from roles.verifier.verifier import TextDecoder, Verifier
from tests.build import a_runspec
from tests.sim.site import Seen, SeenEngine, SimBus, Site
from tests.sim.watch import HeadWatch

EOS_ID = 2
VOCAB = 7


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
class Peer:
    """One running node."""

    name: str
    role: str
    site: Site
    stop: asyncio.Event
    work: asyncio.Task[None]

    @property
    def bus(self) -> SimBus:
        """Its way to the broker."""
        return self.site.bus

    async def crash(self) -> None:
        """Kill -9: from now on nothing of this node reaches anybody."""
        self.site.kill()
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
        self.watch = HeadWatch(self.bucket)
        self.seen = Seen()
        self.tasks = tasks or some_tasks()
        self.broker_is_away = False
        self.decoder: TextDecoder = Parity()
        self.misread: set[str] = set()
        """Prompts that the verifier has other tokens for: their groups end as dead letters."""
        self.policies: list[FakePolicy] = []
        """Of each learner process, in the order of their starts."""
        self.learners: set[str] = set()
        """Names of all learners that ever played."""
        self.forgotten: set[str] = set()
        """Groups that were consumed when the broker lost its disk and had changed nothing: dropped, dead, or
        of steps without a gradient. The bucket knows only those that an update lists."""
        self.trained_before: set[str] = set()
        """Groups in committed updates when it did: the bucket must know them all."""
        self._directory = directory
        self._faults = faults
        self._stores = 0
        self._started = 0

    async def create(self) -> None:
        """Create the run."""
        await SimBus(self.broker, self.spec.name, "creator", self.seen, lambda: False).create_run(self.spec)
        self.broker.audience(self.spec.name).announcements.append(self.watch)

    async def restart_broker(self, away_s: float) -> None:
        """Nobody reaches the broker for a while; then it has forgotten what it may forget."""
        self.broker_is_away = True
        await self.clock.sleep(away_s)
        for queue in self.broker.run(self.spec.name).queues.values():
            queue.forget_ids()
        self.broker_is_away = False

    def bus(self, name: str) -> SimBus:
        """One more node's way to the broker."""
        return SimBus(self.broker, self.spec.name, name, self.seen, lambda: self.broker_is_away)

    def learner(self, name: str = "learner-1", *, identity: Identity | None = None) -> Peer:
        """Start a learner, with the key that belongs to its name unless another ``identity`` is given."""
        self.learners.add(name)

        def part(ring: Ring, site: Site) -> Part:
            policy = FakePolicy()
            self.policies.append(policy)
            train, held_out = (self._prompts(rows) for rows in (self.tasks.train, self.tasks.held_out))
            learner = Learner(
                ring,
                site.store,
                policy,
                offload=site.offload,
                aside=site.offload,
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

        def part(ring: Ring, site: Site) -> Part:
            settings = {"eos_ids": (EOS_ID,), "vocab_size": VOCAB, "seconds_per_token": 0.05}
            fake = SeenEngine(self.seen, site.clock, **(settings | engine))
            sampler = Sampler(ring, site.store, fake, site.offload)
            return Part("sampler", sampler.run, lambda: sampler.clock, lambda: sampler.busy, fake.close)

        return self._start(name, "sampler", part)

    def verifier(self, name: str = "verifier-1") -> Peer:
        """Start a verifier."""

        def part(ring: Ring, _site: Site) -> Part:
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
        part: Callable[[Ring, Site], Part],
        identity: Identity | None = None,
    ) -> Peer:
        site = self._site(name)
        identity = identity or Identity.deterministic(name)
        self._started += 1
        numbers = itertools.count()
        process = self._started
        ring = Ring(
            site.bus, identity, self.spec, role, site.clock, lambda: f"{name}-{process}-{next(numbers)}"
        )
        presence = Presence(Ring(site.bus, identity, self.spec, "node", site.clock), (role,), {})
        stop = asyncio.Event()
        node = Node(ring, presence, [part(ring, site)])
        return Peer(name, role, site, stop, asyncio.create_task(node.run(stop), name=name))

    def _site(self, name: str) -> Site:
        """What one more process stands on."""
        return Site(self.bus(name), self.store(), self.clock)

    def _as_the_verifier_reads_it(self, row: Row) -> list[int]:
        return [] if row.prompt in self.misread else prompt_token_ids(row)

    def _prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        return [Prompt(i, np.array(prompt_token_ids(row), np.int32)) for i, row in enumerate(rows)]


async def _nothing() -> None:
    """There is nothing to close."""
