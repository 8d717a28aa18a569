"""The Bus port in memory: one MemoryBus a node, all on one MemoryBroker.

It keeps the contract that NatsBus keeps, on one thread and under any Clock. What a network may lose,
delay or repeat passes through ``MemoryBus.ask``; while ``MemoryBus.connected`` is false nothing is handed
out to this node.
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
from node.memory_broker import Audience, MemoryBroker, MemoryRun, NoSuchRun
from node.memory_consumer import MemoryConsumer
from node.memory_keys import PAYLOAD_BYTES_MAX
from protocol.errors import BrokerAbsent, BusError, MessageTooLarge
from protocol.limits import QUEUE_MESSAGES_MAX
from protocol.ports import Entry, QueueDepth, Write
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue

T = TypeVar("T")


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

    async def look(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request that changes nothing, which a bus may repeat."""
        return await self.ask(effect)

    @property
    def connected(self) -> bool:
        """Whether the broker can be spoken to right now; messages arrive only then."""
        return not self._closed

    def peek(self) -> MemoryRun | None:
        """The run, if it exists."""
        return self._broker.run(self._run) if self._run in self._broker.runs() else None

    def reconnected(self) -> None:
        """Ask for messages anew; for a simulation whose node found the broker again."""
        for consumer in self._consumers:
            consumer.renew()

    async def create_run(self, spec: RunSpec, *, queue_messages_max: int = QUEUE_MESSAGES_MAX) -> None:
        """Create the run; again is harmless. A new run's revisions are later than in any earlier
        life of it. Raises BusError."""
        assert spec.name == self._run
        with suppress(NoSuchRun):
            await self.ask(lambda _: None)
        self._broker.create(spec, queue_messages_max)

    async def exists(self) -> bool:
        """Whether the run was created. Raises BrokerAbsent."""
        try:
            await self.ask(lambda _: None)
        except NoSuchRun:
            return False
        return True

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        """Store a message."""
        check_message(data, message_id)
        await self.ask(lambda run: run.queues[queue].publish(bytes(data), message_id))

    async def consume(self, queue: Queue, credit: int) -> MemoryConsumer:
        """Take part in a queue."""
        check_credit(credit)
        ack_wait_s = await self.look(lambda run: run.queues[queue].ack_wait_s)
        audience = self._broker.audience(self._run)
        consumer = self._consumer(audience, queue, credit, ack_wait_s)
        self._consumers.append(consumer)
        return consumer

    async def depth(self, queue: Queue) -> QueueDepth:
        """Messages in a queue."""
        return await self.look(lambda run: run.queues[queue].depth())

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        """Newest value of a key, or None."""
        check_key(key)
        return await self.look(lambda run: run.buckets[bucket].get(key))

    async def list(self, bucket: Bucket, prefix: str) -> dict[str, Entry]:
        """All live keys below ``prefix``, sorted."""
        check_prefix(prefix)
        return await self.look(lambda run: run.buckets[bucket].below(prefix))

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
        feed = self._feed()
        self._broker.audience(self._run).announcements.append(feed)
        self._feeds.append(feed)
        if self._closed:
            feed.close()
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
        feeds = self._broker.audience(self._run).events

        def tune_in(run: MemoryRun) -> list[bytes]:
            feeds.append(feed)
            return [*run.events] if replay else []

        try:
            for frame in await self.ask(tune_in):
                yield frame
            async for frame in feed:
                yield frame
        finally:
            if feed in feeds:
                feeds.remove(feed)

    async def dead_letters(self) -> Sequence[bytes]:
        """All dead letters, oldest first."""
        return await self.look(lambda run: tuple(run.dead))

    def _consumer(self, audience: Audience, queue: Queue, credit: int, ack_wait_s: float) -> MemoryConsumer:
        return MemoryConsumer(self, self._broker.clock, audience, queue, credit, ack_wait_s)

    def _feed(self) -> Feed[Entry]:
        return Feed()

    async def close(self) -> None:
        """Leave: what was not handed out goes to others at once, what was not settled after ack_wait."""
        if not self._closed:
            for consumer in self._consumers:
                await consumer.close()
        self.crash()

    def crash(self) -> None:
        """Be gone without a word: everything comes back to others after ack_wait."""
        if self._closed:
            return
        self._closed = True
        for consumer in self._consumers:
            consumer.leave()
        for feed in self._feeds:
            feed.close()
            self._broker.audience(self._run).announcements.remove(feed)
