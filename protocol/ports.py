"""What a role may ask of the world: the bus, the adapter store, and time.

Roles receive these as constructor arguments and import nothing else that does I/O. Every port has a
shipped in-memory twin that passes the same contract tests as the real adapter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from protocol.manifest import Manifest
from protocol.subjects import Bucket, Queue

T = TypeVar("T")


class Clock(Protocol):
    """Time as a role sees it; virtual in simulations."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    def wall(self) -> float:
        """Unix seconds; for people only, never for decisions."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's newest value and its revision."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Write:
    """One write of an atomic commit. ``expected`` 0 means the key must never have been written."""

    key: str
    value: bytes
    expected: int | None = None
    ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Messages in a queue: not yet delivered, and delivered but not settled."""

    pending: int
    unacknowledged: int

    @property
    def total(self) -> int:
        """Everything in the queue."""
        return self.pending + self.unacknowledged


class Delivery(Protocol):
    """One message handed to one taker; exactly one of ack, release, reject settles it."""

    @property
    def data(self) -> bytes:
        """The payload, fetched from the Object Store if it travelled by reference."""
        ...

    @property
    def deliveries(self) -> int:
        """How often this message was handed out, this time included."""
        ...

    async def ack(self) -> None:
        """Done for good; returns once the broker confirmed. Raises BusError if it did not."""
        ...

    async def release(self, delay_s: float = 0.0) -> None:
        """Give it to somebody else, after ``delay_s``. Best effort: ack_wait does the same later."""
        ...

    async def reject(self) -> None:
        """Never deliver it again. Best effort."""
        ...

    async def in_progress(self) -> None:
        """A sign of life that restarts ack_wait. Best effort."""
        ...

    def free(self) -> None:
        """Count it no longer against the consumer's credit: its taker has the same work in hand by another
        delivery. It can still be settled."""
        ...


class Consumer(Protocol):
    """A taker's share of a queue. At most ``credit`` deliveries are unsettled, and not free, at any time."""

    async def next(self) -> Delivery:
        """Wait for the next delivery, for ever, across reconnections. Safe to cancel."""
        ...

    async def close(self) -> None:
        """Stop asking; undelivered messages stay with the broker, and deliveries that next() never handed
        out are released."""
        ...


class Bus(Protocol):
    """The broker, bound to one run. Every method raises BusError subclasses and nothing else."""

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        """Store a message; returns once the broker confirmed. ``message_id`` deduplicates resends as an
        optimisation only. Raises BackPressure, BrokerAbsent, UnknownOutcome, MessageTooLarge."""
        ...

    async def consume(self, queue: Queue, credit: int) -> Consumer:
        """Take part in a queue."""
        ...

    async def depth(self, queue: Queue) -> QueueDepth:
        """The broker's own count."""
        ...

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        """Newest value of a key, or None if absent, deleted or expired."""
        ...

    async def list(self, bucket: Bucket, prefix: str) -> dict[str, Entry]:
        """All live keys ``<prefix>.<something>`` (or every key for an empty prefix), in sorted order."""
        ...

    async def put(
        self, bucket: Bucket, key: str, value: bytes, *, expected: int | None = None, ttl_s: int | None = None
    ) -> int:
        """Write a key, returns its revision. With ``expected`` (0: must be absent) raises WrongRevision
        when somebody else wrote it, UnknownOutcome when nobody can tell."""
        ...

    async def delete(self, bucket: Bucket, key: str) -> None:
        """Remove a key; no error when absent."""
        ...

    async def commit(self, bucket: Bucket, writes: Sequence[Write]) -> int:
        """All writes or none, returns the revision of the last one. Raises WrongRevision, UnknownOutcome."""
        ...

    def announcements(self) -> AsyncIterator[Entry]:
        """Heads as they are committed (keys ``head.<learner>``). Lossy by nature: poll ``list`` as well."""
        ...

    async def emit(self, role: str, node: str, data: bytes) -> None:
        """Send telemetry; never waits for a confirmation and never raises on a lost connection."""
        ...

    async def bury(self, data: bytes) -> None:
        """Store a dead letter."""
        ...

    def events(self, *, replay: bool) -> AsyncIterator[bytes]:
        """Telemetry frames as they come; with ``replay`` all that the broker still keeps come first."""
        ...

    async def dead_letters(self) -> Sequence[bytes]:
        """All dead letters that the broker keeps."""
        ...

    async def close(self) -> None:
        """Leave the broker in order."""
        ...


class AdapterStore(Protocol):
    """The bucket. A path is written once; what lacks its manifest does not exist.

    Every method raises StoreError subclasses and nothing else, has a deadline of its own, and does
    its I/O off the event loop.
    """

    async def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write ``files`` under ``manifest.path``, then the manifest, then confirm. Publishing the same
        bytes again succeeds; other bytes raise StoreConflict."""
        ...

    async def fetch(self, path: str) -> Path:
        """A local, complete, verified copy of ``path`` (a directory that holds ``manifest.json``). Raises
        StoreNotFound, StoreCorrupt, StoreUnavailable, StoreDenied; never leaves a partial directory."""
        ...

    async def manifest(self, path: str) -> Manifest:
        """The verified manifest alone. Raises like ``fetch``."""
        ...

    async def list(self, prefix: str) -> Sequence[str]:
        """Paths of complete entries below directory ``prefix``, sorted; ``a/1`` is not below ``a/10``."""
        ...

    async def delete(self, path: str) -> None:
        """Remove an entry, manifest first; no error when absent."""
        ...


class Offload(Protocol):
    """Runs heavy work off the event loop: a thread in a node, in line in a simulation."""

    async def __call__(self, work: Callable[[], T], /) -> T:
        """Run ``work`` and return what it returns or raise what it raises."""
        ...
