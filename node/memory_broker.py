"""A broker in memory: the state of its runs, with the semantics that nats-server was measured to have.

Everything here is synchronous and happens at once; ``memory_bus`` adds the waiting. Time comes from a
Clock, so redelivery, deduplication and expiry also work under virtual time. Where it differs from the
server, it is wrong: ``tests/contract/test_broker_model.py`` compares them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from node.bus_rules import HEADERS_MAX, HISTORY, NODE_AGE_S
from node.feed import Feed
from node.memory_keys import KeyRules, MemoryKeys
from node.memory_queue import MemoryQueue, Taker
from protocol.errors import BrokerAbsent
from protocol.limits import NODE_BYTES_MAX
from protocol.ports import Clock, Entry
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue, head_key

EVENTS_KEPT = 10_000
LIFE = 1 << 32
"""Sequences of a run that is created again begin so much later than before, as no two lives share one."""
_RULES = {bucket: KeyRules() for bucket in Bucket}
_RULES[Bucket.NODE] = KeyRules(NODE_BYTES_MAX + HEADERS_MAX, NODE_AGE_S, atomic=False)
"""As ``nats_setup`` makes them: presence is small, passes, and is written alone."""
UNSAVED_S = 0.25
"""A killed nats-server 2.15 forgets what it handed out in about its last quarter of a second."""


class NoSuchRun(BrokerAbsent):
    """The broker answers but has no such run."""


@dataclass
class Audience:
    """Who listens to a run. It outlives what the broker stores."""

    takers: defaultdict[Queue, list[Taker]] = field(default_factory=lambda: defaultdict(list))
    announcements: list[Feed[Entry]] = field(default_factory=list)
    events: list[Feed[bytes]] = field(default_factory=list)
    on_back: list[Callable[[], None]] = field(default_factory=list)
    """Called after the broker was away."""


class MemoryRun:
    """All that a broker holds of one run."""

    def __init__(
        self, clock: Clock, spec: RunSpec, queue_messages_max: int, audience: Audience, first: int
    ) -> None:
        """Revisions and sequences begin at ``first``."""
        ack_wait_s = spec.sampling.ack_wait_s
        self._audience = audience
        self.queues = {
            queue: MemoryQueue(clock, ack_wait_s, queue_messages_max, audience.takers[queue], first)
            for queue in Queue
        }
        self.buckets = {
            bucket: MemoryKeys(clock, self._on_write(bucket), HISTORY[bucket], first, _RULES[bucket])
            for bucket in Bucket
        }
        self.announcements = audience.announcements
        self.events: deque[bytes] = deque(maxlen=EVENTS_KEPT)
        self.dead: list[bytes] = []

    def emit(self, data: bytes) -> None:
        """Keep a telemetry frame and pass it on."""
        self.events.append(data)
        for feed in self._audience.events:
            feed.put(data)

    def _on_write(self, bucket: Bucket) -> Callable[[Entry], None]:
        def announce(entry: Entry) -> None:
            learner = entry.key.removeprefix(head_key(""))
            if bucket is Bucket.POLICY and learner != entry.key and "." not in learner:
                for feed in self.announcements:
                    feed.put(entry)

        return announce


class MemoryBroker:
    """The runs of one broker, shared by the MemoryBus of every node."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._runs: dict[str, MemoryRun] = {}
        self._audiences: defaultdict[str, Audience] = defaultdict(Audience)
        self._lives = 0

    def create(self, spec: RunSpec, queue_messages_max: int) -> None:
        """Create a run, or bring its settings up to date and keep what it holds."""
        run = self._runs.get(spec.name)
        if run is None:
            first = self._lives * LIFE + 1
            run = MemoryRun(self.clock, spec, queue_messages_max, self.audience(spec.name), first)
            self._runs[spec.name] = run
        for queue in run.queues.values():
            queue.ack_wait_s, queue.messages_max = spec.sampling.ack_wait_s, queue_messages_max

    def runs(self) -> list[str]:
        """Names of all runs, sorted."""
        return sorted(self._runs)

    def run(self, name: str) -> MemoryRun:
        """One run; raises NoSuchRun if it was never created, as a broker without its streams does."""
        if name not in self._runs:
            raise NoSuchRun(f"nobody answers for run {name}; it may not exist")
        return self._runs[name]

    def audience(self, name: str) -> Audience:
        """Who listens to a run, whether it exists or not."""
        return self._audiences[name]

    def restart(self, unsaved_s: float = UNSAVED_S) -> None:
        """Killed and started again: what was confirmed is kept; see ``MemoryQueue.restart`` for the rest."""
        for run in self._runs.values():
            for queue in run.queues.values():
                queue.restart(unsaved_s)
        self._tell_back()

    def lose_disk(self) -> None:
        """Killed and started again with an empty disk: every run is gone until it is created again."""
        for run in self._runs.values():
            for queue in run.queues.values():
                queue.vanish()
        self._runs.clear()
        self._lives += 1
        self._tell_back()

    def _tell_back(self) -> None:
        for audience in self._audiences.values():
            for notify in tuple(audience.on_back):
                notify()
