"""A node's bus whose every word travels on a ``Line``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from node.bus_checks import check_event, check_key
from node.bus_rules import ACK_RETRY_S, ACK_TRIES
from node.feed import Feed
from node.memory_broker import Audience, MemoryBroker, MemoryRun
from node.memory_consumer import MemoryConsumer, MemoryDelivery
from node.memory_queue import MemoryQueue, Stored
from protocol.errors import BrokerAbsent, UnknownOutcome, WrongRevision
from protocol.ports import Clock, Entry, Write
from protocol.subjects import Bucket, Queue
from tests.sim.line import Line, Silent
from tests.sim.site import Seen, SimBus

T = TypeVar("T")


class StormBus(SimBus):
    """A SimBus on a line. Reads are repeated and writes are not, as in ``node/nats_bus.py``."""

    def __init__(
        self,
        broker: MemoryBroker,
        run: str,
        node: str,
        seen: Seen,
        clock: Clock,
        open_line: Callable[[StormBus], Line],
    ) -> None:
        super().__init__(broker, run, node, seen, lambda: False)
        self._clock = clock
        self.line = open_line(self)
        """The way to the broker."""

    @property
    def connected(self) -> bool:
        """Whether messages are handed to this node."""
        return super().connected and self.line.connected

    async def ask(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request that may change something."""
        return await self.line.change(self._at_the_broker(effect))

    async def look(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request that changes nothing."""
        return await self.line.read(self._at_the_broker(effect))

    def say(self, effect: Callable[[MemoryRun], object]) -> None:
        """Fire and forget."""
        self.line.say(self._at_the_broker(effect))

    async def settle(self, effect: Callable[[MemoryRun], bool]) -> None:
        """One acknowledgement; the broker is silent when ``effect`` says no."""

        def answer() -> None:
            if not effect(self._broker.run(self._run)):
                raise Silent

        await self.line.change(answer, ACK_RETRY_S)

    async def put(
        self, bucket: Bucket, key: str, value: bytes, *, expected: int | None = None, ttl_s: int | None = None
    ) -> int:
        """Write a key; what was refused because it had to be absent is looked at again."""
        try:
            return await super().put(bucket, key, value, expected=expected, ttl_s=ttl_s)
        except WrongRevision:
            if expected == 0:
                await self.get(bucket, key)
            raise

    async def commit(self, bucket: Bucket, writes: Sequence[Write]) -> int:
        """All writes or none. Until the last message nothing can take effect."""
        if len(writes) > 1:
            try:
                await self.ask(lambda _: None)
            except UnknownOutcome as exc:
                raise BrokerAbsent("a commit could not begin") from exc
        return await super().commit(bucket, writes)

    async def emit(self, role: str, node: str, data: bytes) -> None:
        """Send telemetry."""
        check_event(data)
        check_key(f"{role}.{node}")
        self.say(lambda run: run.emit(bytes(data)))

    def crash(self) -> None:
        """Be gone without a word."""
        super().crash()
        self.line.die()

    def _consumer(self, audience: Audience, queue: Queue, credit: int, ack_wait_s: float) -> MemoryConsumer:
        return StormConsumer(self, self._clock, audience, queue, credit, ack_wait_s)

    def _feed(self) -> Feed[Entry]:
        return Relay(self.line)

    def _at_the_broker(self, effect: Callable[[MemoryRun], T]) -> Callable[[], T]:
        return lambda: effect(self._broker.run(self._run))


class Relay(Feed[Entry]):
    """Announcements on their way to one peer: at most once, and each in its own time."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def put(self, item: Entry) -> None:
        """A head was committed."""
        self._line.announce(partial(super().put, item))


class StormDelivery(MemoryDelivery):
    """A delivery whose taker may be cut off."""

    _bus: StormBus

    async def ack(self) -> None:
        """Done for good, as ``node/nats_delivery.py`` insists on it."""
        unknown: UnknownOutcome | None = None
        try:
            for _ in range(ACK_TRIES):
                try:
                    await self._bus.settle(lambda run: run.queues[self._queue].acknowledge(self.sequence))
                except UnknownOutcome as exc:
                    unknown = exc
                    self.free()
                except BrokerAbsent:
                    if unknown is None:
                        raise
                    break
                else:
                    return
        finally:
            self.free()
        assert unknown is not None
        raise unknown

    async def in_progress(self) -> None:
        """Restart ack_wait; best effort."""
        self._bus.say(lambda run: run.queues[self._queue].prolong(self.sequence))

    async def _say(self, effect: Callable[[MemoryQueue], None]) -> None:
        self._bus.say(lambda run: effect(run.queues[self._queue]))
        self.free()


class StormConsumer(MemoryConsumer):
    """Messages handed to it are on their way for a while, and lost with the connection."""

    _bus: StormBus

    def __init__(
        self, bus: StormBus, clock: Clock, audience: Audience, queue: Queue, credit: int, ack_wait_s: float
    ) -> None:
        self._flying: set[int] = set()
        self._handed = 0
        super().__init__(bus, clock, audience, queue, credit, ack_wait_s)

    async def next(self) -> MemoryDelivery:
        """The next delivery; nothing ever again for a process that is gone."""
        try:
            return await super().next()
        except BrokerAbsent:
            if self._bus.line.dead:
                await asyncio.Event().wait()
            raise

    def hand(self, message: Stored) -> None:
        """Take a message that was asked for, some time from now."""
        self._ordered -= 1
        self._handed += 1
        self._flying.add(self._handed)
        delivery = StormDelivery(self._bus, self._clock, self._queue, message, self._on_settled)
        self._bus.line.push(partial(self._arrive, delivery, self._handed))

    def renew(self) -> None:
        """Ask anew after a reconnection; nothing while there is none."""
        self._flying.clear()
        self._ordered = 0
        if self._bus.connected:
            super().renew()

    def _order(self) -> None:
        if not self._flying:
            super()._order()

    def _arrive(self, delivery: StormDelivery, number: int) -> None:
        self._flying.discard(number)
        self._unsettled += 1
        delivery.received_at = self._clock.monotonic()
        if self._closed:
            delivery.free()
            return
        self._ready.append(delivery)
        self._order()
        self._news.set()

    def _give_back(self) -> None:
        back, self._ready = self._ready, type(self._ready)()
        for delivery in back:
            self._bus.say(partial(_free, self._queue, delivery.sequence))
            delivery.free()


def _free(queue: Queue, sequence: int, run: MemoryRun) -> None:
    run.queues[queue].postpone(sequence, 0.0)
