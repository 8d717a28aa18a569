"""A taker's share of a work queue: our own pull loop.

One pull request is outstanding at a time and asks for the free credit. Messages arrive under the
stream's subject, statuses under the request's own inbox, so a status is always attributable. The
loop asks again when the request is spent, ended or silent for two heartbeats, and under a new inbox
after each reconnection: requests of the old connection then die for want of a listener.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from functools import partial

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from node.bus_rules import to_ask
from node.nats_answers import status
from node.nats_blob import BLOB_HEADER, BlobRef, Blobs
from node.nats_delivery import NatsDelivery
from node.nats_link import Link
from protocol.errors import BrokerAbsent, BusError

EXPIRES_S = 30.0
"""A pull request's life; below the 2 minutes after which account exports drop answers."""
HEARTBEAT_S = 2.0
SILENT_S = 2.2 * HEARTBEAT_S
PAUSE_S = 0.25
"""Mean pause after a request that was refused (no consumer, shutting down)."""
BLOB_RETRY_S = 1.0
"""A message whose payload could not be read for the moment comes back after this."""
UNREADABLE = b""
"""Delivered for a payload that cannot be read: no message decodes from it, so the node buries it."""

log = structlog.get_logger("nats")


class NatsConsumer:
    """At most ``credit`` unsettled deliveries of one durable consumer; make it with ``start``."""

    def __init__(self, link: Link, blobs: Blobs, stream: str, consumer: str, credit: int) -> None:
        self._link = link
        self._blobs = blobs
        self._stream = stream
        self._consumer = consumer
        self._credit = credit
        self._ack_wait_s = 0.0
        self._ready: asyncio.Queue[tuple[NatsDelivery, float] | None] = asyncio.Queue()
        self._unsettled = 0
        self._owed = 0  # what the outstanding request may still bring
        self._heard_at = 0.0
        self._pause_until = 0.0
        self._inbox = ""
        self._requests = 0
        self._stale_inbox = True
        self._closed = False
        self._wake = asyncio.Event()
        self._subscription: Subscription | None = None
        self._loop: asyncio.Task[None] | None = None
        self._fetching: set[asyncio.Task[None]] = set()

    async def start(self) -> NatsConsumer:
        """Look the consumer up and begin to ask. Raises BrokerAbsent if there is none."""
        info = await self._link.read_api(f"CONSUMER.INFO.{self._stream}.{self._consumer}")
        self._ack_wait_s = info["config"]["ack_wait"] / 1e9
        self._link.on_back.append(self._on_back)
        self._loop = asyncio.create_task(self._ask_for_ever(), name=f"pull {self._stream}")
        return self

    async def next(self) -> NatsDelivery:
        """Wait for the next delivery; a cancelled call loses nothing. Raises BrokerAbsent once closed."""
        while True:
            # After this await nothing suspends, so what was taken is always returned.
            item = await self._ready.get()
            if item is None:
                self._ready.put_nowait(None)
                raise BrokerAbsent("this consumer is closed")
            if self._ready.empty():
                self._wake.set()
            delivery, received_at = item
            if asyncio.get_running_loop().time() - received_at < self._ack_wait_s:
                return delivery
            delivery.free()  # its ack_wait is over, somebody else has it by now

    async def close(self) -> None:
        """Stop asking and give back what next() never handed out."""
        if self._closed:
            return
        self._closed = True
        self._link.on_back.remove(self._on_back)
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait({self._loop})
        if self._subscription is not None:
            await self._link.unsubscribe(self._subscription)
        for task in tuple(self._fetching):
            task.cancel()
        if self._fetching:
            await asyncio.wait(self._fetching)
        await self._give_back()
        self._ready.put_nowait(None)

    async def _ask_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            with suppress(BusError):  # disconnected in between: on_back wakes us
                await self._ask_if_due(loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, self._next_check(loop.time()))):
                    await self._wake.wait()

    def _next_check(self, now: float) -> float:
        if now < self._pause_until:
            return self._pause_until - now
        return self._heard_at + SILENT_S - now if self._owed else HEARTBEAT_S

    async def _ask_if_due(self, now: float) -> None:
        if not self._link.connected or now < self._pause_until:
            return
        if self._stale_inbox:
            await self._renew_inbox()
            await self._give_back()  # a restarted broker may not know that it handed these out
        if self._owed and now - self._heard_at >= SILENT_S:
            log.warning("pull_request_lost", stream=self._stream)
            await self._renew_inbox()
        batch = to_ask(self._credit, self._unsettled, self._ready.qsize()) if self._owed == 0 else 0
        if batch:
            await self._ask(batch, now)

    async def _renew_inbox(self) -> None:
        old, self._subscription = self._subscription, None
        if old is not None:
            with suppress(BusError):
                await self._link.unsubscribe(old)
        self._inbox = self._link.new_inbox()
        self._subscription = await self._link.subscribe(f"{self._inbox}.*", self._on_message)
        self._owed = 0
        self._stale_inbox = False

    async def _give_back(self) -> None:
        """Release what next() has not handed out."""
        while not self._ready.empty():
            item = self._ready.get_nowait()
            if item is not None:
                await item[0].release()

    async def _ask(self, batch: int, now: float) -> None:
        self._requests += 1
        body = {"batch": batch, "expires": int(EXPIRES_S * 1e9), "idle_heartbeat": int(HEARTBEAT_S * 1e9)}
        self._owed, self._heard_at = batch, now
        try:
            await self._link.send(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
                json.dumps(body).encode(),
                reply=self._request_inbox,
            )
        except BusError:
            self._owed = 0
            raise

    @property
    def _request_inbox(self) -> str:
        return f"{self._inbox}.{self._requests}"

    async def _on_message(self, msg: Msg) -> None:
        now = asyncio.get_running_loop().time()
        self._heard_at = now
        code = status(msg)
        if code is None:
            self._owed = max(0, self._owed - 1)
            await self._on_delivery(msg, now)
        elif code != "100" and msg.subject == self._request_inbox:
            self._owed = 0
            if code not in ("404", "408"):  # 409, 503: nobody serves us for now
                self._pause_until = now + random.uniform(0, 2 * PAUSE_S)
        if self._owed == 0:
            self._wake.set()

    async def _on_delivery(self, msg: Msg, now: float) -> None:
        self._unsettled += 1
        delivery = NatsDelivery(self._link, msg, self._on_settled)
        if self._closed or self._unsettled > self._credit:
            await delivery.release()
            return
        reference = (msg.headers or {}).get(BLOB_HEADER)
        if reference is None:
            self._ready.put_nowait((delivery, now))
            return
        task = asyncio.create_task(self._fetch(delivery, reference, now))
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)

    async def _fetch(self, delivery: NatsDelivery, reference: str, now: float) -> None:
        """Read a payload that travelled by reference, then hand the delivery out."""
        ref = BlobRef.parse(reference, delivery.author)
        try:
            data = None if ref is None else await self._blobs.get(ref)
            if data is None and await self._is_settled(delivery):
                delivery.free()  # another taker acknowledged it and removed the payload
                return
        except BusError:
            await delivery.release(BLOB_RETRY_S)
            return
        except asyncio.CancelledError:
            await delivery.release()
            raise
        if data is None:
            log.warning("blob_unreadable", stream=self._stream, reference=reference)
        delivery.data = UNREADABLE if data is None else data
        if ref is not None:
            delivery.forget = partial(self._blobs.remove, ref)
        self._ready.put_nowait((delivery, now))

    async def _is_settled(self, delivery: NatsDelivery) -> bool:
        """Whether the message left its queue meanwhile."""
        return await self._link.read_at(self._stream, delivery.receipt.stream_sequence) is None

    def _on_settled(self) -> None:
        self._unsettled -= 1
        self._wake.set()

    def _on_back(self) -> None:
        self._owed = 0
        self._stale_inbox = True
        self._wake.set()
