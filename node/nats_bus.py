"""The Bus port on a NATS broker with JetStream, for one run.

All faults of the connection and of nats-py end in ``nats_link`` and ``nats_client``; this file only
says which subject carries what.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from nats.aio.msg import Msg

from node.broker_access import BrokerAccess
from node.bus_checks import check_credit, check_event, check_message
from node.bus_rules import message_bytes
from node.entry_cache import EntryCache
from node.feed import Feed
from node.nats_answers import sequence
from node.nats_blob import BLOB_HEADER, Blobs
from node.nats_client import FIRST_CONNECT_S
from node.nats_kv import Kv, is_deletion
from node.nats_link import Link
from node.nats_objects import Objects
from node.nats_pull import NatsConsumer
from node.nats_setup import create_streams
from node.nats_store import NatsStore
from protocol.errors import (
    BackPressure,
    BrokerAbsent,
    BusError,
    MessageTooLarge,
    OperatorError,
    UnknownOutcome,
)
from protocol.limits import INLINE_BYTES_MAX, QUEUE_MESSAGES_MAX
from protocol.ports import Entry, QueueDepth, Write
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Names, Queue, head_key

EVENT_POLL_S = 1.0
"""How often a reader of events looks without having been woken."""
EVENT_SETTLE_S = 0.02
"""A live event wakes its readers a moment before the broker has stored it."""


class NatsBus:
    """One run on one connection; make it with ``NatsBus.connect``."""

    def __init__(self, link: Link, run: str, node: str) -> None:
        self._link = link
        self._node = node
        self._names = Names(run)
        self._kv = Kv(link, self._names)
        self._consumers: list[NatsConsumer] = []
        self._announcements: list[Feed[Entry]] = []
        self._closed = False

    @classmethod
    async def connect(
        cls, access: BrokerAccess, run: str, *, node: str, timeout_s: float = FIRST_CONNECT_S
    ) -> NatsBus:
        """Connect for good; raises OperatorError if no usable broker answers within ``timeout_s``."""
        self = cls(await Link.open(access, node, timeout_s), run, node)
        await self._link.subscribe(self._names.announce_subject("*"), self._on_announcement)
        return self

    async def create_run(self, spec: RunSpec, *, queue_messages_max: int = QUEUE_MESSAGES_MAX) -> None:
        """Create what the run needs on the broker; again is harmless. A new run's revisions are
        later than in any earlier life of it. Raises OperatorError, BusError."""
        assert spec.name == self._names.run
        await create_streams(self._link, spec, queue_messages_max)

    async def exists(self) -> bool:
        """Whether the run was created on this broker. Raises BrokerAbsent."""
        return await self._link.has_stream(self._names.kv_stream(Bucket.RUN))

    def adapter_store(self, cache: EntryCache, timeout_s: float) -> NatsStore:
        """The run's adapter store in this broker; it lives as long as this connection."""
        return NatsStore(Objects(self._link, self._names.adapter_bucket), cache, timeout_s)

    async def create_adapter_store(self) -> None:
        """Create what ``adapter_store`` uses; again is harmless. Raises OperatorError, BusError."""
        try:
            await Objects(self._link, self._names.adapter_bucket).create()
        except BackPressure as exc:
            raise OperatorError(
                f"the broker has no room for adapters: {exc}; raise its max_file_store"
            ) from exc

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        """Store a message, by reference if it is large; returns once the broker confirmed."""
        check_message(data, message_id)
        subject, headers = self._names.subject(queue, self._node), {"Nats-Msg-Id": message_id}
        if len(data) <= INLINE_BYTES_MAX and message_bytes(data, headers) <= self._link.max_payload:
            await self._link.store(subject, data, headers)
            return
        blobs = Blobs(self._link, self._names, queue)
        self._link.check_size(b"", headers | {BLOB_HEADER: str(blobs.example(self._node, len(data)))})
        ref = await blobs.put(data, self._node)
        try:
            answer = await self._link.store(subject, b"", headers | {BLOB_HEADER: str(ref)})
        except UnknownOutcome:
            raise  # the message may be there and need its payload
        except (BusError, MessageTooLarge):
            await blobs.remove(ref)
            raise
        if answer.get("duplicate"):
            await blobs.remove(ref)

    async def consume(self, queue: Queue, credit: int) -> NatsConsumer:
        """Take part in a queue with at most ``credit`` unsettled deliveries."""
        check_credit(credit)
        stream, consumer = self._names.stream(queue), self._names.consumer(queue)
        blobs = Blobs(self._link, self._names, queue)
        started = await NatsConsumer(self._link, blobs, stream, consumer, credit).start()
        self._consumers.append(started)
        return started

    async def depth(self, queue: Queue) -> QueueDepth:
        """The broker's own count."""
        info = await self._link.read_api(
            f"CONSUMER.INFO.{self._names.stream(queue)}.{self._names.consumer(queue)}"
        )
        return QueueDepth(pending=info["num_pending"], unacknowledged=info["num_ack_pending"])

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        """Newest value of a key, or None."""
        return await self._kv.get(bucket, key)

    async def list(self, bucket: Bucket, prefix: str) -> dict[str, Entry]:
        """All live keys below ``prefix``, sorted."""
        return await self._kv.below(bucket, prefix)

    async def put(
        self, bucket: Bucket, key: str, value: bytes, *, expected: int | None = None, ttl_s: int | None = None
    ) -> int:
        """Write a key, returns its revision."""
        return await self._kv.put(bucket, Write(key, value, expected, ttl_s))

    async def delete(self, bucket: Bucket, key: str) -> None:
        """Remove a key; no error when absent."""
        await self._kv.delete(bucket, key)

    async def commit(self, bucket: Bucket, writes: Sequence[Write]) -> int:
        """All writes or none, returns the revision of the last one."""
        return await self._kv.commit(bucket, writes)

    def announcements(self) -> AsyncIterator[Entry]:
        """Heads as they are committed, from now on."""
        feed: Feed[Entry] = Feed()
        self._announcements.append(feed)
        if self._closed:
            feed.close()
        return feed

    async def emit(self, role: str, node: str, data: bytes) -> None:
        """Send telemetry; dropped while disconnected."""
        check_event(data)
        with suppress(BusError):
            await self._link.send(self._names.event_subject(role, node), data)

    async def bury(self, data: bytes) -> None:
        """Store a dead letter."""
        await self._link.store(self._names.dead_subject(self._node), data)

    async def events(self, *, replay: bool) -> AsyncIterator[bytes]:
        """Telemetry in the broker's order, each frame once, across reconnections.

        The live subscription only says that there is news; frames are always read from the stream.
        """
        stream, subject = self._names.event_stream, self._names.event_subject("*", "*")
        news = asyncio.Event()
        news.set()  # what was emitted just before may not be stored yet: look twice

        async def on_news(_: Msg) -> None:
            news.set()

        subscription = await self._link.subscribe(subject, on_news)
        try:
            newest = await self._last_event()
            first = 1 if replay else newest + 1
            while True:
                async for at, msg in self._patient_walk(stream, subject, first):
                    first = at + 1
                    yield msg.data
                woken = news.is_set()
                news.clear()
                if woken:
                    await asyncio.sleep(EVENT_SETTLE_S)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVENT_POLL_S):
                        await news.wait()
        finally:
            await self._link.unsubscribe(subscription)

    async def dead_letters(self) -> Sequence[bytes]:
        """All dead letters that the broker keeps, oldest first."""
        walk = self._link.walk(self._names.dead_stream, self._names.dead_subject("*"))
        return [msg.data async for _, msg in walk]

    async def close(self) -> None:
        """Give back what was not handed out, say what is queued, and leave."""
        for consumer in self._consumers:
            await consumer.close()
        self._closed = True
        for feed in self._announcements:
            feed.close()
        await self._link.close()

    async def _on_announcement(self, msg: Msg) -> None:
        if is_deletion(msg) or not msg.headers or "Nats-Sequence" not in msg.headers:
            return  # not a republished head: somebody published here by hand
        learner = msg.subject.rpartition(".")[2]
        entry = Entry(head_key(learner), msg.data, sequence(msg))
        for feed in self._announcements:
            feed.put(entry)

    async def _patient_walk(self, stream: str, subject: str, first: int) -> AsyncIterator[tuple[int, Msg]]:
        try:
            async for item in self._link.walk(stream, subject, first):
                yield item
        except BrokerAbsent:
            await self._link.until_connected()

    async def _last_event(self) -> int:
        info = await self._link.read_api(f"STREAM.INFO.{self._names.event_stream}")
        return int(info["state"]["last_seq"])
