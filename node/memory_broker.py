"""A broker in memory: the state of its runs, with the semantics that nats-server was measured to have.

Everything here is synchronous and happens at once; ``memory_bus`` adds the waiting. Time comes from a
Clock, so redelivery, deduplication and expiry also work under virtual time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.feed import Feed
from protocol.errors import BackPressure, BrokerAbsent, MessageTooLarge, WrongRevision
from protocol.limits import DEDUPE_WINDOW_S
from protocol.ports import Clock, Entry, QueueDepth, Write
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue, head_key

PAYLOAD_BYTES_MAX = 1 << 20
"""Largest value of a key, as nats-server's default."""
EVENTS_KEPT = 10_000


@dataclass(slots=True)
class Stored:
    """A message in a queue."""

    sequence: int
    data: bytes
    deliveries: int = 0
    due: float | None = None
    """When it may be handed out again; None while nobody has it."""


class MemoryQueue:
    """A work queue: each message is handed out until it is acknowledged."""

    def __init__(self, clock: Clock, ack_wait_s: float, messages_max: int) -> None:
        self._clock = clock
        self.ack_wait_s = ack_wait_s
        self.messages_max = messages_max
        self._sequence = 0
        self._waiting: deque[Stored] = deque()
        self._taken: dict[int, Stored] = {}
        self._seen: OrderedDict[str, float] = OrderedDict()
        self.listeners: list[Callable[[], None]] = []
        """Called when a message may have become available."""

    def publish(self, data: bytes, message_id: str) -> None:
        """Append a message unless its id was seen within the window. Raises BackPressure."""
        now = self._clock.monotonic()
        while self._seen and next(iter(self._seen.values())) <= now - DEDUPE_WINDOW_S:
            self._seen.popitem(last=False)
        if message_id in self._seen:
            return
        if len(self._waiting) + len(self._taken) >= self.messages_max:
            raise BackPressure("maximum messages exceeded")
        self._seen[message_id] = now
        self._sequence += 1
        self._waiting.append(Stored(self._sequence, data))
        self._notify()

    def take(self) -> Stored | None:
        """Hand out a message whose ack_wait is over, else the oldest new one."""
        now = self._clock.monotonic()
        overdue = (m for m in self._taken.values() if m.due is not None and m.due <= now)
        message = min(overdue, key=lambda m: (m.due, m.sequence), default=None)
        if message is None:
            if not self._waiting:
                return None
            message = self._waiting.popleft()
            self._taken[message.sequence] = message
        message.deliveries += 1
        message.due = now + self.ack_wait_s
        return message

    def next_due(self) -> float | None:
        """When the next message becomes available without anybody's doing."""
        return min((m.due for m in self._taken.values() if m.due is not None), default=None)

    def remove(self, sequence: int) -> None:
        """Acknowledged or rejected, by whoever had it last or before."""
        self._taken.pop(sequence, None)

    def postpone(self, sequence: int, delay_s: float) -> None:
        """Available again after ``delay_s``; nothing if it is gone."""
        if sequence in self._taken:
            self._taken[sequence].due = self._clock.monotonic() + delay_s
            self._notify()

    def depth(self) -> QueueDepth:
        """What is in it."""
        return QueueDepth(pending=len(self._waiting), unacknowledged=len(self._taken))

    def forget_ids(self) -> None:
        """A restarted server knows the ids of messages it still stores; none, at worst."""
        self._seen.clear()

    def _notify(self) -> None:
        for listener in tuple(self.listeners):
            listener()


@dataclass(frozen=True, slots=True)
class Value:
    """A key's newest value."""

    data: bytes
    revision: int
    expires_at: float | None


class MemoryKeys:
    """Keys with revisions from one counter, compare-and-set, and expiry."""

    def __init__(self, clock: Clock, on_write: Callable[[Entry], None]) -> None:
        self._clock = clock
        self._on_write = on_write
        self._revision = 0
        self._values: dict[str, Value] = {}

    def get(self, key: str) -> Entry | None:
        """Newest value, or None if absent or expired."""
        value = self._values.get(key)
        if value is None or (value.expires_at is not None and value.expires_at <= self._clock.monotonic()):
            return None
        return Entry(key, value.data, value.revision)

    def below(self, prefix: str) -> dict[str, Entry]:
        """All live keys below ``prefix``, sorted."""
        keys = sorted(key for key in self._values if not prefix or key.startswith(f"{prefix}."))
        return {key: entry for key in keys if (entry := self.get(key)) is not None}

    def write(self, writes: Sequence[Write]) -> int:
        """All or none; raises WrongRevision, MessageTooLarge."""
        for write in writes:
            if len(write.value) > PAYLOAD_BYTES_MAX:
                raise MessageTooLarge(f"{write.key}: {len(write.value)} bytes")
            entry = self.get(write.key)
            revision = 0 if entry is None else entry.revision
            if write.expected is not None and write.expected != revision:
                raise WrongRevision(f"{write.key}: wrong last revision: {revision}")
        now = self._clock.monotonic()
        for write in writes:
            self._revision += 1
            expires_at = None if write.ttl_s is None else now + write.ttl_s
            self._values[write.key] = Value(write.value, self._revision, expires_at)
            self._on_write(Entry(write.key, write.value, self._revision))
        return self._revision

    def delete(self, key: str) -> None:
        """Remove a key; costs a revision, as a marker does."""
        self._revision += 1
        self._values.pop(key, None)


class MemoryRun:
    """All that a broker holds of one run."""

    def __init__(self, clock: Clock, spec: RunSpec, queue_messages_max: int) -> None:
        ack_wait_s = spec.sampling.ack_wait_s
        self.queues = {queue: MemoryQueue(clock, ack_wait_s, queue_messages_max) for queue in Queue}
        self.buckets = {bucket: MemoryKeys(clock, self._on_write(bucket)) for bucket in Bucket}
        self.announcements: list[Feed[Entry]] = []
        self.events: deque[bytes] = deque(maxlen=EVENTS_KEPT)
        self.event_feeds: list[Feed[bytes]] = []
        self.dead: list[bytes] = []

    def emit(self, data: bytes) -> None:
        """Keep a telemetry frame and pass it on."""
        self.events.append(data)
        for feed in self.event_feeds:
            feed.put(data)

    def _on_write(self, bucket: Bucket) -> Callable[[Entry], None]:
        def announce(entry: Entry) -> None:
            if bucket is Bucket.POLICY and entry.key.startswith(head_key("")):
                for feed in self.announcements:
                    feed.put(entry)

        return announce


class MemoryBroker:
    """The runs of one broker, shared by the MemoryBus of every node."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._runs: dict[str, MemoryRun] = {}

    def create(self, spec: RunSpec, queue_messages_max: int) -> None:
        """Create a run, or bring its settings up to date and keep what it holds."""
        run = self._runs.setdefault(spec.name, MemoryRun(self.clock, spec, queue_messages_max))
        for queue in run.queues.values():
            queue.ack_wait_s, queue.messages_max = spec.sampling.ack_wait_s, queue_messages_max

    def runs(self) -> list[str]:
        """Names of all runs, sorted."""
        return sorted(self._runs)

    def run(self, name: str) -> MemoryRun:
        """One run; raises BrokerAbsent if it was never created, as a broker without its streams does."""
        if name not in self._runs:
            raise BrokerAbsent(f"nobody answers for run {name}; it may not exist")
        return self._runs[name]
