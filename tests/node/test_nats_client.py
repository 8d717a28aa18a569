"""Canaries: each override of nats-py, shown to be needed and to work.

A test of ``Client`` that fails after an upgrade says that nats-py changed: look whether the override in
``node/nats_client.py`` is still needed, and still fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client, Server
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from node.broker import Broker, BrokerOptions, start_broker
from node.broker_access import BrokerAccess
from node.nats_client import BACKOFF_CAP_S, HardenedClient, jittered_backoff, message_bytes, open_client
from protocol.errors import OperatorError

BOTH = pytest.mark.parametrize("kind", [Client, HardenedClient])
GREETING = b'INFO {"version":"2.15.1","max_payload":4194304,"headers":true}\r\n'
Connect = Any


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
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

            async def on_error(_: Exception) -> None:
                pass

            settings = {"reconnect_time_wait": 0.01, "error_cb": on_error, "reconnected_cb": on_back} | options
            await client.connect(server.url, token=server.token, **settings)
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
        with suppress(nats.errors.Error):
            await client.flush(timeout=1)
        assert client.is_closed or client.stats["reconnects"] > 0 or not client.is_connected


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
async def test_what_was_not_sent_before_a_break_is_sent_later_unless_hardened(connect: Connect, kind: type[Client]):
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
    async with _fake_server(GREETING) as (url, connections):
        client = kind()
        await client.connect(url, reconnect_time_wait=0.01, error_cb=_ignore)
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


# --- opening -------------------------------------------------------------------------------------


async def test_no_broker_is_one_clear_line_that_names_the_url(unused_tcp_port: int):
    access = BrokerAccess(f"nats://user:secret@127.0.0.1:{unused_tcp_port}")
    with pytest.raises(OperatorError) as raised:
        await open_client(access, "node-1", on_lost=_nothing, on_back=_nothing, timeout_s=0.3)
    assert f"no broker at nats://127.0.0.1:{unused_tcp_port} (" in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_a_server_that_says_nothing_is_given_up_in_time():
    async with _fake_server(greeting=b"") as (url, _):
        with pytest.raises(OperatorError, match=url):
            async with asyncio.timeout(5):
                await open_client(BrokerAccess(url), "n", on_lost=_nothing, on_back=_nothing, timeout_s=0.3)


@pytest.mark.parametrize("url", ["", "localhost:4222", "http://x:1", "nats://", "redis://x"])
def test_a_url_of_another_kind_is_refused(url: str):
    with pytest.raises(OperatorError, match="not a broker URL"):
        BrokerAccess(url)


def test_files_that_do_not_exist_are_named(tmp_path: Path):
    with pytest.raises(OperatorError, match="missing.creds: no such file"):
        BrokerAccess("nats://x:1", credentials=tmp_path / "missing.creds")


def test_pauses_are_jittered_bounded_and_only_for_hosts_that_were_named():
    pool = [Server(uri=Client._parse_server_uri(f"nats://{host}:4222"), reconnects=9) for host in ("gossip", "own")]
    choose = jittered_backoff(frozenset({"own:4222"}))
    choices = [choose(pool, {}) for _ in range(200)]
    assert {server.uri.hostname for server, _ in choices} == {"own"}
    pauses = [pause for _, pause in choices]
    assert max(pauses) <= BACKOFF_CAP_S
    assert min(pauses) < BACKOFF_CAP_S / 4 < BACKOFF_CAP_S / 2 < max(pauses)


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


@asynccontextmanager
async def _fake_server(greeting: bytes) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """Greets, answers the first PING, then never reads again."""
    connections: list[asyncio.StreamWriter] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(greeting)
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"PING\r\n")
            writer.write(b"PONG\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections
    finally:
        server.close()
        for writer in connections:
            writer.transport.abort()


async def _ticks(happened: Any) -> None:
    async with asyncio.timeout(5):
        while not happened():
            await asyncio.sleep(0)


async def _nothing() -> None:
    """A callback that does nothing."""


async def _ignore(_: Exception) -> None:
    """An error callback that does nothing."""
