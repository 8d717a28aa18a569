"""Taking messages from a broker in memory: a consumer that asks ahead, and its deliveries.

It asks by the rule of the real one (``bus_rules.to_ask``): up to ``credit`` messages are its own before
``next`` hands them out, nobody else gets them meanwhile, and those kept waiting for longer than ack_wait
are somebody else's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from node.bus_rules import ACK_RETRY_S, ACK_TRIES, to_ask
from node.memory_broker import Audience, MemoryRun
from node.memory_queue import MemoryQueue, Stored
from protocol.errors import BrokerAbsent, BusError, UnknownOutcome
from protocol.ports import Clock
from protocol.subjects import Queue

T = TypeVar("T")


class Connection(Protocol):
    """A node's way to the broker."""

    @property
    def connected(self) -> bool:
        """Whether the broker can be spoken to right now."""
        ...

    async def ask(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request and its answer. Raises BusError."""
        ...

    def peek(self) -> MemoryRun | None:
        """The run, if it exists."""
        ...


class MemoryDelivery:
    """One message, to be settled once; see ``protocol.ports.Delivery``."""

    def __init__(
        self, bus: Connection, clock: Clock, queue: Queue, message: Stored, on_settled: Callable[[], None]
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._queue = queue
        self._on_settled = on_settled
        self._settled = False
        self.sequence = message.sequence
        self.received_at = message.handed_at
        self.data = message.data
        self.deliveries = message.deliveries

    async def ack(self) -> None:
        """Done for good. Raises BrokerAbsent, UnknownOutcome."""
        unknown = UnknownOutcome("the broker does not know that it handed this message out")
        asked = False
        try:
            for _ in range(ACK_TRIES):
                try:
                    if await self._bus.ask(lambda run: run.queues[self._queue].acknowledge(self.sequence)):
                        return
                except UnknownOutcome as exc:
                    unknown = exc
                asked = True
                self.free()  # with its credit free, the message can be handed out again to this very node
                await self._clock.sleep(ACK_RETRY_S)
        except BrokerAbsent:
            if not asked:
                raise
        finally:
            self.free()
        raise unknown

    async def release(self, delay_s: float = 0.0) -> None:
        """Give it to somebody else; best effort."""
        await self._say(lambda queue: queue.postpone(self.sequence, delay_s))

    async def reject(self) -> None:
        """Never deliver it again; best effort."""
        await self._say(lambda queue: queue.remove(self.sequence))

    async def in_progress(self) -> None:
        """Restart ack_wait; best effort."""
        with suppress(BusError):
            await self._bus.ask(lambda run: run.queues[self._queue].prolong(self.sequence))

    async def _say(self, effect: Callable[[MemoryQueue], None]) -> None:
        """Settle it: the broker hears of that before it is asked for another message."""
        try:
            with suppress(BusError):
                await self._bus.ask(lambda run: effect(run.queues[self._queue]))
        finally:
            self.free()

    def free(self) -> None:
        """Count it no longer against its taker's credit; says nothing to the broker."""
        if not self._settled:
            self._settled = True
            self._on_settled()


class MemoryConsumer:
    """At most ``credit`` unsettled deliveries of one queue."""

    def __init__(
        self, bus: Connection, clock: Clock, audience: Audience, queue: Queue, credit: int, ack_wait_s: float
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._audience = audience
        self._queue = queue
        self._credit = credit
        self._ack_wait_s = ack_wait_s
        self._ready: deque[MemoryDelivery] = deque()
        self._unsettled = 0
        self._ordered = 0  # asked for and not yet here
        self._closed = False
        self._news = asyncio.Event()
        audience.takers[queue].append(self)
        audience.on_back.append(self.renew)
        self._ask()

    @property
    def wants(self) -> int:
        """How many messages may be handed to it now."""
        return self._ordered if self._bus.connected else 0

    def hand(self, message: Stored) -> None:
        """Take a message that was asked for."""
        self._ordered -= 1
        self._unsettled += 1
        self._ready.append(MemoryDelivery(self._bus, self._clock, self._queue, message, self._on_settled))
        self._order()
        self._news.set()

    async def next(self) -> MemoryDelivery:
        """Wait for the next delivery; a cancelled call loses nothing. Raises BrokerAbsent once closed."""
        while True:
            while self._ready:
                delivery = self._ready.popleft()
                self._ask()
                if self._clock.monotonic() - delivery.received_at < self._ack_wait_s:
                    return delivery
                delivery.free()  # its ack_wait is over, somebody else has it by now
            if self._closed:
                raise BrokerAbsent("this consumer is closed")
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """Take no more, and give back what next() never handed out."""
        self.leave()
        self._give_back()

    def leave(self) -> None:
        """Take no more, and say nothing: what was not settled comes back to others after ack_wait."""
        if not self._closed:
            self._closed = True
            self._audience.takers[self._queue].remove(self)
            self._audience.on_back.remove(self.renew)
            self._news.set()

    def renew(self) -> None:
        """Ask anew after the broker was away. It may not know what it handed out, so that goes back."""
        self._ordered = 0
        self._give_back()
        self._ask()

    def _order(self) -> None:
        if self._ordered == 0 and not self._closed:
            self._ordered = to_ask(self._credit, self._unsettled, len(self._ready))
            if self._ordered:  # a new request waits behind those of others
                takers = self._audience.takers[self._queue]
                takers.remove(self)
                takers.append(self)

    def _ask(self) -> None:
        self._order()
        run = self._bus.peek()
        if run is not None and self.wants:
            run.queues[self._queue].hand_out()

    def _give_back(self) -> None:
        back, self._ready = self._ready, deque()
        run = self._bus.peek()
        for delivery in back:
            delivery.free()
            if run is not None and self._bus.connected:
                run.queues[self._queue].postpone(delivery.sequence, 0.0)

    def _on_settled(self) -> None:
        self._unsettled -= 1
        self._ask()
