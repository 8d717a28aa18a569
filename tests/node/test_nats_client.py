"""Canaries: each override of nats-py, shown to be needed and to work.

A test of ``Client`` that fails after an upgrade says that nats-py changed: look whether the override in
``node/nats_client.py`` is still needed, and still fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from node.broker import Broker, start_broker
from node.broker_config import BrokerOptions
from node.bus_rules import message_bytes
from node.nats_client import HardenedClient, jittered_backoff
from tests.node.sites import fake_server

BOTH = pytest.mark.parametrize("kind", [Client, HardenedClient])
GREETING = b'INFO {"version":"2.15.1","max_payload":4194304,"headers":true}\r\n'
Connect = Any


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = start_broker(tmp_path_factory.mktemp("broker"), options=BrokerOptions(max_payload_bytes=1024))
    yield broker
    broker.stop()


@pytest.fixture
async def connect(server: Broker) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def connect(kind: type[Client], **options: Any) -> tuple[Client, asyncio.Event]:
            client, back = kind(), asyncio.Event()

            async def on_back() -> None:
                back.set()

            settings: dict[str, Any] = {"error_cb": _ignore, "reconnected_cb": on_back, **options}
            await client.connect(server.url, token=server.token, reconnect_time_wait=0, **settings)
            stack.push_async_callback(client.close)
            return client, back

        yield connect


@BOTH
async def test_flush_is_a_barrier_only_when_hardened(connect: Connect, kind: type[Client]):
    client, _ = await connect(kind)
    wire = _Recorder(client._transport)
    client._transport = wire
    await client.publish("x", b"before")
    await client.flush()
    order = [word for word in b"".join(wire.written).split() if word in (b"PUB", b"PING")]
    assert order == ([b"PUB", b"PING"] if kind is HardenedClient else [b"PING", b"PUB"])


@BOTH
async def test_an_expired_login_reconnects_only_when_hardened(connect: Connect, kind: type[Client]):
    client, back = await connect(kind)
    await client._process_err("'user authentication expired'")
    if kind is HardenedClient:
        async with asyncio.timeout(5):
            await back.wait()
        assert client.is_connected
    else:
        await _ticks(lambda: client.is_closed)


@BOTH
async def test_closing_in_the_middle_of_a_reconnection_is_cancelled_unless_hardened(
    connect: Connect, kind: type[Client]
):
    cancelled = []
    for steps in range(8):  # of the reconnection, before it is overtaken
        client, _ = await connect(kind)
        await client._process_op_err(nats.errors.StaleConnectionError())
        for _ in range(steps):
            await asyncio.sleep(0)
        try:
            await client.close()
        except asyncio.CancelledError:
            cancelled.append(steps)
        assert client.is_closed
    assert bool(cancelled) == (kind is Client)


async def test_closing_that_is_itself_cancelled_says_so(connect: Connect):
    client, _ = await connect(HardenedClient)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


@BOTH
async def test_a_denied_subject_never_costs_the_connection(connect: Connect, kind: type[Client]):
    client, _ = await connect(kind)
    await client._process_err("'permissions violation for publish to \"x\"'")
    await client.flush()
    assert client.is_connected
    assert client.stats["reconnects"] == 0


@BOTH
async def test_header_bytes_cost_the_connection_unless_hardened(connect: Connect, kind: type[Client]):
    client, _ = await connect(kind)
    payload, headers = bytes(1000), {"X": "y" * 200}
    if kind is HardenedClient:
        with pytest.raises(nats.errors.MaxPayloadError):
            await client.publish("x", payload, headers=headers)
        await client.flush()
        assert client.stats["reconnects"] == 0
    else:
        await client.publish("x", payload, headers=headers)
        await _ticks(lambda: not client.is_connected)


async def test_a_message_of_exactly_the_limit_is_sent(connect: Connect):
    client, _ = await connect(HardenedClient)
    headers = {"X": "y" * 200}
    room = 1024 - message_bytes(b"", headers)
    inbox = client.new_inbox()
    arrived = await client.subscribe(inbox)
    await client.publish(inbox, bytes(room), headers=headers)
    assert len((await arrived.next_msg(5)).data) == room
    with pytest.raises(nats.errors.MaxPayloadError):
        await client.publish(inbox, bytes(room + 1), headers=headers)


@BOTH
async def test_a_fault_in_the_parser_leaves_no_zombie_when_hardened(
    connect: Connect, kind: type[Client], monkeypatch: pytest.MonkeyPatch
):
    client, back = await connect(kind)

    async def broken(self: Parser, data: bytes = b"") -> None:
        monkeypatch.undo()
        raise TypeError("a bug")

    reading = client._reading_task
    assert reading is not None
    monkeypatch.setattr(Parser, "parse", broken)
    await client._flush_pending()
    client._transport.write(b"PING\r\n")
    await asyncio.wait({reading}, timeout=5)
    if kind is HardenedClient:
        async with asyncio.timeout(5):
            await back.wait()
        await client.flush()
    else:
        assert client.is_connected  # and deaf
        assert reading.done()


@BOTH
async def test_what_a_break_kept_from_leaving_is_sent_later_unless_hardened(
    connect: Connect, kind: type[Client]
):
    listener, _ = await connect(Client)
    heard = await listener.subscribe("late.*")
    await listener.flush()
    client, back = await connect(kind)
    client._pending.append(b"PUB late.1 1\r\nx\r\n")
    await client._process_op_err(nats.errors.StaleConnectionError())
    async with asyncio.timeout(5):
        await back.wait()
    await client.publish("late.2", b"")
    first = await heard.next_msg(5)
    assert first.subject == ("late.2" if kind is HardenedClient else "late.1")


@BOTH
async def test_an_odd_exception_while_reconnecting_is_survived_when_hardened(
    connect: Connect, kind: type[Client], monkeypatch: pytest.MonkeyPatch
):
    # nats-py catches everything when it chooses the server itself, but not for a handler's choice.
    client, back = await connect(kind, reconnect_to_server_handler=jittered_backoff(frozenset()))

    async def broken(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("502 from a proxy")

    monkeypatch.setattr(TcpTransport, "connect", broken)
    await client._process_op_err(nats.errors.StaleConnectionError())
    task = client._reconnection_task
    assert task is not None
    await asyncio.wait({task}, timeout=5)
    if kind is HardenedClient:
        assert back.is_set()
        assert client.is_connected
    else:
        assert isinstance(task.exception(), RuntimeError)
        assert not client.is_connected


@BOTH
async def test_a_peer_that_stopped_reading_delays_no_reconnection_when_hardened(kind: type[Client]):
    async with fake_server(GREETING) as (url, connections):
        client: Any = kind()
        await client.connect(url, reconnect_time_wait=0, error_cb=_ignore)
        await client.publish("x", bytes(1 << 20))
        for _ in range(15):  # more than the sockets hold
            client._transport.write(bytes(1 << 20))
        await client._process_op_err(nats.errors.StaleConnectionError())
        if kind is HardenedClient:
            async with asyncio.timeout(5):
                while len(connections) < 2:
                    await asyncio.sleep(0)
        else:
            await asyncio.wait({client._reconnection_task}, timeout=0.3)
            assert len(connections) == 1
        client._transport._io_writer.transport.abort()
        client._reconnection_task.cancel()
        with suppress(OSError):
            await client.close()


class _Recorder:
    """A transport that remembers what was written."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.written: list[bytes] = []

    def write(self, payload: bytes) -> None:
        self.written.append(payload)
        self._transport.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self.written += payload
        self._transport.writelines(payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def _ticks(happened: Any) -> None:
    async with asyncio.timeout(5):
        while not happened():
            await asyncio.sleep(0)


async def _ignore(_: Exception) -> None:
    """An error callback that does nothing."""
