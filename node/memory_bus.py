"""The Bus port in memory: one MemoryBus a node, all on one MemoryBroker.

It keeps the contract that NatsBus keeps, on one thread and under any Clock. What a network may lose,
delay or repeat passes through ``MemoryBus.ask``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from node.bus_checks import (
    check_commit,
    check_credit,
    check_event,
    check_key,
    check_message,
    check_prefix,
    check_write,
)
from node.feed import Feed
from node.memory_broker import PAYLOAD_BYTES_MAX, MemoryBroker, MemoryQueue, MemoryRun, Stored
from protocol.errors import BrokerAbsent, BusError, MessageTooLarge
from protocol.limits import QUEUE_MESSAGES_MAX
from protocol.ports import Clock, Entry, QueueDepth, Write
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue

T = TypeVar("T")


class MemoryDelivery:
    """One message, to be settled once; see ``protocol.ports.Delivery``."""

    def __init__(self, bus: MemoryBus, queue: Queue, message: Stored, on_settled: Callable[[], None]) -> None:
        self._bus = bus
        self._queue = queue
        self._sequence = message.sequence
        self._on_settled = on_settled
        self._settled = False
        self.data = message.data
        self.deliveries = message.deliveries

    async def ack(self) -> None:
        """Done for good. Raises BrokerAbsent, UnknownOutcome."""
        try:
            await self._bus.ask(lambda run: run.queues[self._queue].remove(self._sequence))
        finally:
            self._settle()

    async def release(self, delay_s: float = 0.0) -> None:
        """Give it to somebody else; best effort."""
        self._settle()
        await self._say(lambda queue: queue.postpone(self._sequence, delay_s))

    async def reject(self) -> None:
        """Never deliver it again; best effort."""
        self._settle()
        await self._say(lambda queue: queue.remove(self._sequence))

    async def in_progress(self) -> None:
        """Restart ack_wait; best effort."""
        await self._say(lambda queue: queue.postpone(self._sequence, queue.ack_wait_s))

    async def _say(self, effect: Callable[[MemoryQueue], None]) -> None:
        with suppress(BusError):
            await self._bus.ask(lambda run: effect(run.queues[self._queue]))

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._on_settled()


class MemoryConsumer:
    """At most ``credit`` unsettled deliveries of one queue, taken when asked for."""

    def __init__(self, bus: MemoryBus, clock: Clock, queue: Queue, credit: int, state: MemoryQueue) -> None:
        self._bus = bus
        self._clock = clock
        self._name = queue
        self._queue = state
        self._credit = credit
        self._unsettled = 0
        self._closed = False
        self._news = asyncio.Event()
        state.listeners.append(self._news.set)

    async def next(self) -> MemoryDelivery:
        """Wait for the next delivery; a cancelled call loses nothing. Raises BrokerAbsent once closed."""
        while True:
            self._news.clear()
            if self._closed:
                self._news.set()  # for others that wait
                raise BrokerAbsent("this consumer is closed")
            if self._unsettled < self._credit:
                message = self._queue.take()
                if message is not None:
                    self._unsettled += 1
                    return MemoryDelivery(self._bus, self._name, message, self._on_settled)
            await self._until_news()

    async def close(self) -> None:
        """Take no more."""
        if not self._closed:
            self._closed = True
            self._queue.listeners.remove(self._news.set)
            self._news.set()

    async def _until_news(self) -> None:
        due = self._queue.next_due() if self._unsettled < self._credit else None
        if due is None:
            await self._news.wait()
            return
        news = asyncio.ensure_future(self._news.wait())
        alarm = asyncio.ensure_future(self._clock.sleep(max(0.0, due - self._clock.monotonic())))
        try:
            await asyncio.wait({news, alarm}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            alarm.cancel()

    def _on_settled(self) -> None:
        self._unsettled -= 1
        self._news.set()


class MemoryBus:
    """One node's handle on one run of a MemoryBroker."""

    def __init__(self, broker: MemoryBroker, run: str, *, node: str) -> None:
        self._broker = broker
        self._run = run
        self.node = node
        self._closed = False
        self._consumers: list[MemoryConsumer] = []
        self._feeds: list[Feed[Entry]] = []

    async def ask(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request to the broker and its answer: the seam at which a simulation interferes."""
        await asyncio.sleep(0)
        if self._closed:
            raise BrokerAbsent("this node has left the broker")
        return effect(self._broker.run(self._run))

    async def create_run(self, spec: RunSpec, *, queue_messages_max: int = QUEUE_MESSAGES_MAX) -> None:
        """Create the run; again is harmless."""
        assert spec.name == self._run
        await asyncio.sleep(0)
        self._broker.create(spec, queue_messages_max)

    async def exists(self) -> bool:
        """Whether the run was created."""
        await asyncio.sleep(0)
        return self._run in self._broker.runs()

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        """Store a message."""
        check_message(data, message_id)
        await self.ask(lambda run: run.queues[queue].publish(bytes(data), message_id))

    async def consume(self, queue: Queue, credit: int) -> MemoryConsumer:
        """Take part in a queue."""
        check_credit(credit)
        state = await self.ask(lambda run: run.queues[queue])
        consumer = MemoryConsumer(self, self._broker.clock, queue, credit, state)
        self._consumers.append(consumer)
        return consumer

    async def depth(self, queue: Queue) -> QueueDepth:
        """Messages in a queue."""
        return await self.ask(lambda run: run.queues[queue].depth())

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        """Newest value of a key, or None."""
        check_key(key)
        return await self.ask(lambda run: run.buckets[bucket].get(key))

    async def list(self, bucket: Bucket, prefix: str) -> dict[str, Entry]:
        """All live keys below ``prefix``, sorted."""
        check_prefix(prefix)
        return await self.ask(lambda run: run.buckets[bucket].below(prefix))

    async def put(
        self, bucket: Bucket, key: str, value: bytes, *, expected: int | None = None, ttl_s: int | None = None
    ) -> int:
        """Write a key, returns its revision."""
        write = Write(key, bytes(value), expected, ttl_s)
        check_write(write)
        return await self.ask(lambda run: run.buckets[bucket].write([write]))

    async def delete(self, bucket: Bucket, key: str) -> None:
        """Remove a key; no error when absent."""
        check_key(key)
        await self.ask(lambda run: run.buckets[bucket].delete(key))

    async def commit(self, bucket: Bucket, writes: Sequence[Write]) -> int:
        """All writes or none, returns the revision of the last one."""
        check_commit(writes)
        return await self.ask(lambda run: run.buckets[bucket].write(writes))

    def announcements(self) -> AsyncIterator[Entry]:
        """Heads as they are committed, from now on."""
        feed: Feed[Entry] = Feed()
        self._broker.run(self._run).announcements.append(feed)
        self._feeds.append(feed)
        return feed

    async def emit(self, role: str, node: str, data: bytes) -> None:
        """Send telemetry."""
        check_event(data)
        check_key(f"{role}.{node}")
        with suppress(BusError):
            await self.ask(lambda run: run.emit(bytes(data)))

    async def bury(self, data: bytes) -> None:
        """Store a dead letter."""
        if len(data) > PAYLOAD_BYTES_MAX:
            raise MessageTooLarge(f"a dead letter of {len(data)} bytes")
        await self.ask(lambda run: run.dead.append(bytes(data)))

    async def events(self, *, replay: bool) -> AsyncIterator[bytes]:
        """Telemetry frames, each once, in order."""
        feed: Feed[bytes] = Feed()

        def tune_in(run: MemoryRun) -> list[bytes]:
            run.event_feeds.append(feed)
            return [*run.events] if replay else []

        try:
            for frame in await self.ask(tune_in):
                yield frame
            async for frame in feed:
                yield frame
        finally:
            feeds = self._broker.run(self._run).event_feeds
            if feed in feeds:
                feeds.remove(feed)

    async def dead_letters(self) -> Sequence[bytes]:
        """All dead letters, oldest first."""
        return await self.ask(lambda run: tuple(run.dead))

    async def close(self) -> None:
        """Leave: what was not settled comes back to others after ack_wait."""
        if self._closed:
            return
        self._closed = True
        for consumer in self._consumers:
            await consumer.close()
        for feed in self._feeds:
            feed.close()
            self._broker.run(self._run).announcements.remove(feed)
