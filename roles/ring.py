"""What every role does with a delivery: keep it alive, decode it or bury it, pass its result on.

The rule of the ring is *at least once, idempotent*: the effect first, the acknowledgement after it;
a resend carries the same id and is the same work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np
import structlog

from protocol.codec import Signed, decode, encode
from protocol.errors import (
    BackPressure,
    BrokerAbsent,
    BusError,
    DecodeError,
    GrpoError,
    StoreCorrupt,
    StoreDenied,
    StoreNotFound,
    StoreUnavailable,
    UnknownOutcome,
    one_line,
)
from protocol.identity import Identity
from protocol.message import Message
from protocol.messages import DeadLetter, Event
from protocol.ports import Bus, Clock, Consumer, Delivery
from protocol.reasons import DeadReason
from protocol.runspec import RunSpec
from protocol.subjects import Queue

PAYLOAD_KEPT = 4096
"""Bytes of an offending message that its dead letter keeps."""

TEXT_KEPT = 500
"""Characters of a text field that telemetry keeps; it may quote a stranger."""

SENT_AT_ONCE = 64
"""Messages whose confirmations are awaited together."""

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0

INSIST_TRIES = 8
INSIST_WAIT_S = 1.0

PASSING: tuple[type[GrpoError], ...] = (BackPressure, BrokerAbsent, UnknownOutcome, StoreUnavailable)
"""What is worth another try."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Handle = Callable[[Delivery, Queue], Coroutine[Any, Any, None]]


class Ring:
    """One node's way of speaking on one run: signs, resends, buries, and tells."""

    def __init__(
        self,
        bus: Bus,
        identity: Identity,
        spec: RunSpec,
        role: str,
        clock: Clock,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """Bind a role to a bus; ``role`` names it in telemetry. ``nonce`` gives a text that nobody else has;
        a simulation, which must repeat itself, counts."""
        self.bus = bus
        self.identity = identity
        self.spec = spec
        self.role = role
        self.clock = clock
        self.nonce = nonce
        self.log = structlog.get_logger().bind(role=role, node=identity.node)
        self._jitter = random.Random(f"{identity.node}/{role}")

    async def receive(self, delivery: Delivery, queue: Queue, kind: type[M]) -> tuple[M, Signed] | None:
        """The message of a delivery, or None after burying one that no node can use."""
        received = await self.read(delivery, queue, kind)
        if received is None or await self.given_up(delivery, queue, _group_id(received[0])):
            return None
        return received

    async def read(self, delivery: Delivery, queue: Queue, kind: type[M]) -> tuple[M, Signed] | None:
        """The message of a delivery however often it came, or None after burying what is not of this run."""
        try:
            signed = decode(delivery.data)
            message = signed.expect(kind)
        except DecodeError as exc:
            await self.bury(delivery, queue, DeadReason.UNDECODABLE, str(exc), None)
            return None
        if getattr(message, "run", None) != self.spec.name:
            detail = "a message of another run"
            await self.bury(delivery, queue, DeadReason.WRONG_RUN, detail, _group_id(message))
            return None
        return message, signed

    async def given_up(self, delivery: Delivery, queue: Queue, group_id: str | None) -> bool:
        """Whether a message came too often without success; it is buried then."""
        if delivery.deliveries <= self.spec.sampling.deliveries_max:
            return False
        detail = f"delivered {delivery.deliveries} times without success"
        await self.bury(delivery, queue, DeadReason.TOO_MANY_DELIVERIES, detail, group_id)
        return True

    async def consume(self, queue: Queue, credit: int) -> Consumer:
        """Take part in a queue, however long the broker takes to answer."""
        return await self.persist(lambda: self.bus.consume(queue, credit))

    async def take_each(
        self, queue: Queue, credit: int, handle: Handle, stop: asyncio.Event, drain_s: float
    ) -> None:
        """Give every delivery of ``queue`` to ``handle`` as a task of its own, until ``stop``.

        Then nothing more is asked for; what is in hand gets ``drain_s`` to finish and is cancelled
        after that (``handle`` releases what it did not finish).
        """
        consumer = await until(stop, self.consume(queue, credit))
        if consumer is None:
            return
        in_hand: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation repeats itself
        async with asyncio.TaskGroup() as group:
            while (delivery := await until(stop, consumer.next())) is not None:
                work = group.create_task(handle(delivery, queue))
                in_hand[work] = None
                work.add_done_callback(in_hand.pop)
            await consumer.close()
            if in_hand:
                grace = asyncio.ensure_future(self.clock.sleep(drain_s))
                rest = asyncio.ensure_future(asyncio.wait(set(in_hand)))
                try:
                    await asyncio.wait({grace, rest}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await cancelled(grace, rest)
            for work in tuple(in_hand):
                work.cancel()

    async def bury(
        self, delivery: Delivery, queue: Queue, reason: DeadReason, detail: str, group_id: str | None
    ) -> None:
        """Store a dead letter, then take the message out of the ring."""
        letter = DeadLetter(
            run=self.spec.name,
            queue=queue.value,
            reason=reason,
            node=self.identity.node,
            detail=detail[:500],
            group_id=group_id,
            payload=np.frombuffer(delivery.data[:PAYLOAD_KEPT], np.uint8),
        )
        self.log.warning(
            "message_buried", queue=queue.value, reason=reason.value, detail=detail, group=group_id
        )
        await self.persist(lambda: self.bus.bury(encode(letter, self.identity)))
        await delivery.reject()

    async def send(self, queue: Queue, message: Message, message_id: str) -> None:
        """Publish until the broker confirmed; waits through absence and back-pressure."""
        frame = encode(message, self.identity)
        await self.persist(lambda: self.bus.publish(queue, frame, message_id))

    async def send_all(self, queue: Queue, messages: Mapping[str, Message]) -> None:
        """Publish messages by id, some at a time: they arrive together, for an engine to batch."""
        items = list(messages.items())
        for start in range(0, len(items), SENT_AT_ONCE):
            some = items[start : start + SENT_AT_ONCE]
            await asyncio.gather(*(self.send(queue, message, key) for key, message in some))

    async def persist(self, request: Callable[[], Awaitable[T]], *, patient: bool = False) -> T:
        """Repeat an idempotent request to broker or store until it succeeds; cancel to give up.

        Everything but absence, back-pressure and an unknown outcome is raised at once. ``patient`` also waits
        out a store that denies what it allowed before: a disk made read-only, a token that expired.
        """
        passing: tuple[type[GrpoError], ...] = (*PASSING, StoreDenied) if patient else PASSING
        wait_s = RETRY_FIRST_S
        while True:
            try:
                return await request()
            except passing as exc:
                self.log.warning("request_retried", error=str(exc) or type(exc).__name__, wait_s=wait_s)
            await self.pause(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    async def insist(self, request: Callable[[], Awaitable[T]]) -> T:
        """Ask the store for what must be there: damage on the way, or a listing that lags, passes.

        Raises StoreCorrupt or StoreNotFound if it does not.
        """
        for _ in range(INSIST_TRIES - 1):
            try:
                return await self.persist(request)
            except (StoreCorrupt, StoreNotFound) as exc:
                self.log.warning("request_retried", error=str(exc), wait_s=INSIST_WAIT_S)
            await self.pause(INSIST_WAIT_S)
        return await self.persist(request)

    async def pause(self, wait_s: float) -> None:
        """Wait before a retry, half as long to half as long again: peers must not retry in step."""
        await self.clock.sleep(wait_s * (0.5 + self._jitter.random()))

    async def settle(self, delivery: Delivery) -> None:
        """Acknowledge; a lost acknowledgement only means a redelivery that its taker recognises."""
        try:
            await delivery.ack()
        except BusError as exc:
            self.log.warning("ack_lost", error=str(exc) or type(exc).__name__)

    @contextlib.asynccontextmanager
    async def alive(self, delivery: Delivery) -> AsyncIterator[None]:
        """Send signs of life for ``delivery`` at a third of ack_wait while the body runs."""
        beat = asyncio.create_task(self._beat(delivery))
        try:
            yield
        finally:
            await cancelled(beat)

    async def _beat(self, delivery: Delivery) -> None:
        while True:
            await self.clock.sleep(self.spec.sampling.ack_wait_s / 3)
            await delivery.in_progress()

    async def tell(self, name: str, **fields: float | str | bool | None) -> None:
        """Emit telemetry and log it; never fails the work it tells of."""
        self.log.info(name, **fields)
        event = Event(
            run=self.spec.name,
            node=self.identity.node,
            role=self.role,
            name=name,
            at=self.clock.wall(),
            fields={
                key: one_line(value, TEXT_KEPT) if isinstance(value, str) else value
                for key, value in fields.items()
                if value == value  # noqa: PLR0124 drops NaN
            },
        )
        await self.bus.emit(self.role, self.identity.node, encode(event, self.identity))


def _group_id(message: Message) -> str | None:
    return getattr(message, "group_id", None)


async def nap(clock: Clock, seconds: float, wake: asyncio.Event) -> None:
    """Sleep, or less if ``wake`` is set meanwhile; clears ``wake``.

    Whoever naps looks at the state after it, so an event that comes while this ends is not lost.
    """
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    woken = asyncio.ensure_future(wake.wait())
    try:
        await asyncio.wait({sleeping, woken}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeping.cancel()
        woken.cancel()
    wake.clear()


async def until(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of ``work``, or None once ``stop`` is set (``work`` is then cancelled)."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(task, stopped)
    return None if task.cancelled() else task.result()


async def cancelled(*work: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end; unlike awaiting it, this lets the caller be cancelled.

    What it raised on the way is nobody's concern any more, unless the caller asks for its result.
    """
    pending = {task for task in work if not task.done()}
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    for task in work:
        if not task.cancelled():
            task.exception()
