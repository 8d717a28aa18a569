"""One connection to a broker: bounded requests, this project's errors, and news of reconnections.

Every wait here ends: a lost connection is given ``CONNECTED_WAIT_S`` to come back, an answer
``REQUEST_S`` to arrive. What was asked when the connection broke is of unknown outcome at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from node.broker_access import BrokerAccess
from node.bus_rules import message_bytes
from node.nats_answers import END_OF_BATCH, NO_RESPONDERS, NOT_FOUND, answer_json, sequence, status
from node.nats_client import FIRST_CONNECT_S, HardenedClient, open_client
from protocol.errors import BrokerAbsent, MessageTooLarge, OperatorError, UnknownOutcome

CONNECTED_WAIT_S = 5.0
REQUEST_S = 5.0
READ_S = 10.0
"""Reads are tried again until then: they change nothing."""
CLOSE_S = 3.0
SERVER_VERSION_MIN = (2, 12)
"""Atomic batches came with nats-server 2.12."""
PAGE_BYTES = 4 << 20
PAGE_MESSAGES = 512
NO_STREAM = "(10059)"

log = structlog.get_logger("nats")


@dataclass(slots=True)
class _Call:
    """A request that waits: for one message, or for all up to a status."""

    many: bool
    parts: list[Msg] = field(default_factory=list)
    done: asyncio.Future[list[Msg]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def take(self, msg: Msg) -> None:
        self.parts.append(msg)
        if not self.done.done() and (not self.many or status(msg) is not None):
            self.done.set_result(self.parts)


class Link:
    """A connection that is lost and found again for ever; make it with ``Link.open``."""

    def __init__(self, access: BrokerAccess) -> None:
        self._access = access
        self.on_back: list[Callable[[], None]] = []
        """Called after each reconnection."""
        self._client: HardenedClient
        self._connected = asyncio.Event()
        self._calls: dict[str, _Call] = {}
        self._next_call = 0
        self._inbox = ""

    @classmethod
    async def open(cls, access: BrokerAccess, node: str, timeout_s: float = FIRST_CONNECT_S) -> Link:
        """Connect and check the server; raises OperatorError."""
        self = cls(access)
        self._client = await open_client(
            access, node, on_lost=self._on_lost, on_back=self._on_back, timeout_s=timeout_s
        )
        version = self._client.connected_server_version
        if (version.major, version.minor) < SERVER_VERSION_MIN:
            await self._client.close()
            raise OperatorError(
                f"nats-server {version.major}.{version.minor} at {access.safe_url} is too old, use 2.12"
            )
        self._inbox = self._client.new_inbox()
        await self.subscribe(f"{self._inbox}.*", self._on_reply)
        self._connected.set()
        return self

    @property
    def connected(self) -> bool:
        """Whether the broker can be spoken to right now."""
        return self._connected.is_set()

    @property
    def max_payload(self) -> int:
        """The server's limit for headers and payload of one message, in bytes."""
        return self._client.max_payload

    def new_inbox(self) -> str:
        """A fresh subject that only this node listens to."""
        return self._client.new_inbox()

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        timeout_s: float = REQUEST_S,
    ) -> Msg:
        """One answer. Raises BrokerAbsent (nothing happened), UnknownOutcome, MessageTooLarge."""
        return (await self._call(_Call(many=False), subject, data, headers, timeout_s))[0]

    async def store(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Publish into a stream; the broker's acknowledgement. Raises whatever ``failure`` names as well."""
        return answer_json(await self.request(subject, data, headers))

    async def api(self, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One JetStream API call that may change something."""
        return answer_json(await self.request(f"$JS.API.{call}", json.dumps(body or {}).encode()))

    async def has_stream(self, stream: str) -> bool:
        """Whether the broker has a stream and this node may use it. Raises BrokerAbsent."""
        try:
            await self.read_api(f"STREAM.INFO.{stream}")
        except BrokerAbsent as exc:
            if NO_STREAM not in str(exc):
                raise
            return False
        return True

    async def read_api(self, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One JetStream API call that changes nothing; raises BrokerAbsent rather than UnknownOutcome."""
        subject = f"$JS.API.{call}"
        return answer_json((await self._read(subject, json.dumps(body or {}).encode(), many=False))[0])

    async def read_last(self, stream: str, subject: str) -> Msg | None:
        """Newest message of a subject, or None."""
        found = await self._read(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", many=False)
        return None if status(found[0]) == NOT_FOUND else found[0]

    async def read_at(self, stream: str, at: int) -> Msg | None:
        """The message of a sequence, or None if it is gone."""
        query = json.dumps({"seq": at}).encode()
        found = await self._read(f"$JS.API.DIRECT.GET.{stream}", query, many=False)
        return None if status(found[0]) == NOT_FOUND else found[0]

    async def read_many(self, stream: str, query: dict[str, Any]) -> list[Msg]:
        """A batch of stored messages; the last element is the status that ended it."""
        query = {"max_bytes": PAGE_BYTES, **query}
        return await self._read(f"$JS.API.DIRECT.GET.{stream}", json.dumps(query).encode(), many=True)

    async def walk(self, stream: str, subject: str, first: int = 1) -> AsyncIterator[tuple[int, Msg]]:
        """Stored messages from sequence ``first`` on, with their sequences, up to the newest."""
        while True:
            query = {"seq": first, "next_by_subj": subject, "batch": PAGE_MESSAGES}
            page = await self.read_many(stream, query)
            for msg in page[:-1]:
                first = sequence(msg) + 1
                yield first - 1, msg
            if (
                status(page[-1]) != END_OF_BATCH
                or int((page[-1].headers or {}).get("Nats-Num-Pending", "0")) == 0
            ):
                return

    async def send(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Fire and forget. Raises BrokerAbsent when disconnected, MessageTooLarge."""
        self.check_size(data, headers)
        if not self.connected:
            raise BrokerAbsent("not connected")
        try:
            await self._client.publish(self._access.local(subject), data, reply, headers)
        except nats.errors.MaxPayloadError as exc:
            raise MessageTooLarge(f"{message_bytes(data, headers)} bytes") from exc
        except nats.errors.Error as exc:
            raise BrokerAbsent(f"not connected: {exc}") from exc

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Listen; nats-py repeats the subscription after each reconnection."""
        try:
            return await self._client.subscribe(subject, cb=callback, pending_bytes_limit=0)
        except nats.errors.Error as exc:
            raise BrokerAbsent(f"not connected: {exc}") from exc

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Stop listening, after all that the server had already sent was handled."""
        with suppress(nats.errors.Error, TimeoutError):
            if self.connected:
                async with asyncio.timeout(CLOSE_S):
                    await subscription.drain()  # type: ignore[no-untyped-call]
            else:
                await subscription.unsubscribe()

    def check_size(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Raise MessageTooLarge on what the server would answer by closing the connection."""
        size = message_bytes(data, headers)
        if size > self.max_payload:
            raise MessageTooLarge(f"{size} bytes with headers; the broker takes {self.max_payload}")

    async def close(self) -> None:
        """Send what is queued, then leave; never takes longer than twice ``CLOSE_S``."""
        self._connected.clear()
        with suppress(nats.errors.Error, OSError, TimeoutError):
            if self._client.is_connected:
                await self._client.flush(timeout=int(CLOSE_S))
        with suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._client.close()
        self._fail_calls()

    async def until_connected(self) -> None:
        """Wait for ever."""
        await self._connected.wait()

    async def _read(self, subject: str, data: bytes, *, many: bool) -> list[Msg]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READ_S
        while True:
            try:
                return await self._call(_Call(many=many), subject, data, None, REQUEST_S)
            except UnknownOutcome as exc:
                if loop.time() >= deadline or self._client.is_closed:
                    raise BrokerAbsent(f"no answer on {subject}") from exc

    async def _call(
        self, call: _Call, subject: str, data: bytes, headers: dict[str, str] | None, timeout_s: float
    ) -> list[Msg]:
        self.check_size(data, headers)
        await self._wait_connected()
        self._next_call += 1
        token = str(self._next_call)
        self._calls[token] = call
        try:
            await self.send(subject, data, reply=f"{self._inbox}.{token}", headers=headers)
            async with asyncio.timeout(timeout_s):
                answer = await call.done
        except TimeoutError as exc:
            raise UnknownOutcome(f"no answer on {subject} within {timeout_s:g} s") from exc
        finally:
            self._calls.pop(token, None)
        if status(answer[0]) == NO_RESPONDERS:
            raise BrokerAbsent(f"nobody answers on {subject}; the run may not exist")
        return answer

    async def _wait_connected(self) -> None:
        if self._client.is_closed:
            raise BrokerAbsent("this node has left the broker")
        if not self.connected:
            try:
                async with asyncio.timeout(CONNECTED_WAIT_S):
                    await self._connected.wait()
            except TimeoutError as exc:
                raise BrokerAbsent(f"not connected for {CONNECTED_WAIT_S:g} s") from exc

    async def _on_reply(self, msg: Msg) -> None:
        call = self._calls.get(msg.subject.rpartition(".")[2])
        if call is not None:
            call.take(msg)

    async def _on_lost(self) -> None:
        self._connected.clear()
        self._fail_calls()
        if self._inbox and not self._client.is_closed:
            log.warning("broker_lost")

    async def _on_back(self) -> None:
        self._connected.set()
        log.info("broker_found")
        for notify in self.on_back:
            notify()

    def _fail_calls(self) -> None:
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(UnknownOutcome("the connection broke before an answer came"))
