"""The bus with a small broker, with lost, damaged and forged payloads, and with many keys."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import socket
from pathlib import Path

import pytest

from node.broker_access import BrokerAccess
from node.nats_blob import Blobs
from node.nats_delivery import Receipt
from protocol.errors import MessageTooLarge
from protocol.limits import INLINE_BYTES_MAX
from protocol.subjects import Bucket, Queue
from tests.node.sites import SPEC, Site, soon

Q = Queue.ROLLOUT
ID, DIGEST = "x" * 22, "0" * 64


# --- sizes and payloads --------------------------------------------------------------------------


async def test_a_small_brokers_limit_is_kept_headers_included_and_the_connection_stays(tmp_path: Path):
    site = Site(tmp_path / "broker", max_payload_bytes=1024)
    try:
        bus = await site.bus()
        consumer = await bus.consume(Q, 1)
        for size in (0, 800, 809, 810, 811, 1000, 1024, 1025, 20_000):
            data = (bytes(range(256)) * 80)[:size]
            await bus.publish(Q, data, f"{size}-".ljust(200, "m"))
            delivery = await soon(consumer)
            assert delivery.data == data
            await delivery.ack()
        with pytest.raises(MessageTooLarge):
            await bus.put(Bucket.RUN, "key", bytes(1000), ttl_s=3600)
        assert bus._link._client.stats["reconnects"] == 0
    finally:
        await site.close()


async def test_a_payload_that_is_gone_is_delivered_as_undecodable(site: Site):
    bus = await site.bus()
    await bus.publish(Q, bytes(INLINE_BYTES_MAX + 1), "m1")
    await bus._link.api(f"STREAM.PURGE.{bus._names.blob_stream(Q)}")
    delivery = await soon(await bus.consume(Q, 1))
    assert delivery.data == b""
    await delivery.reject()


@pytest.mark.parametrize("reference", ["", "nonsense", f"{ID} 99999999999 {DIGEST}", f"{ID} 5 {DIGEST}"])
async def test_a_forged_reference_is_delivered_as_undecodable(site: Site, reference: str):
    bus = await site.bus()
    await bus._link.store(bus._names.subject(Q, "node-1"), b"", {"Grpo-Blob": reference})
    assert (await soon(await bus.consume(Q, 1))).data == b""


async def test_a_damaged_payload_is_delivered_as_undecodable(site: Site):
    bus = await site.bus()
    ref = await Blobs(bus._link, bus._names, Q).put(bytes(1000), "node-1")
    forged = f"{ref.slot} 1000 {'0' * 64}"
    await bus._link.store(bus._names.subject(Q, "node-1"), b"", {"Grpo-Blob": forged})
    assert (await soon(await bus.consume(Q, 1))).data == b""


async def test_an_acknowledged_payload_leaves_no_bytes_behind(site: Site):
    bus = await site.bus()
    for _ in range(2):  # the second one is a resend
        await bus.publish(Q, bytes(INLINE_BYTES_MAX + 1), "m1")
    await (await soon(await bus.consume(Q, 1))).ack()
    stored = f"STREAM.INFO.{bus._names.blob_stream(Q)}"
    async with asyncio.timeout(10):
        while (await bus._link.read_api(stored))["state"]["bytes"] > 1000:
            pass


# --- the rest ------------------------------------------------------------------------------------


async def test_a_changed_ack_wait_is_taken_over(site: Site):
    bus = await site.bus()
    slower = SPEC.sampling.model_copy(update={"ack_wait_s": 30.0})
    await bus.create_run(SPEC.model_copy(update={"sampling": slower}), queue_messages_max=5)
    assert (await bus.consume(Q, 1))._ack_wait_s == 30.0


async def test_more_keys_than_one_answer_holds_are_listed(site: Site):
    bus = await site.bus()
    keys = [f"done.g{number:04}" for number in range(1100)]
    await asyncio.gather(*(bus.put(Bucket.POLICY, key, b"") for key in keys))
    assert list(await bus.list(Bucket.POLICY, "done")) == keys


def test_both_layouts_of_an_acknowledgement_subject_are_read():
    assert Receipt.parse("$JS.ACK.stream.consumer.3.41.7.1700000000.5") == Receipt(41, 3)
    assert Receipt.parse("$JS.ACK.hub.HASH.stream.consumer.3.41.7.1700000000.5.rnd") == Receipt(41, 3)


@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="WebSocket URLs need aiohttp")
@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")  # nats-py's
async def test_a_websocket_reconnects_through_a_proxy_that_answers_errors_meanwhile(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    site = Site(tmp_path / "broker", extra={"websocket": {"host": "127.0.0.1", "port": port, "no_tls": True}})
    try:
        url = f"ws://127.0.0.1:{port}/nats"
        access = BrokerAccess(url, token=site.broker.token, headers={"Authorization": "Bearer x"})
        bus = await site.bus(access=access)
        await bus.publish(Q, bytes(INLINE_BYTES_MAX + 1), "m1")
        site.end(signal.SIGKILL)
        failing = await asyncio.start_server(_answer_502, "127.0.0.1", port)
        async with asyncio.timeout(5):
            while bus._link._client._server_pool[0].reconnects < 2:
                await asyncio.sleep(0)
        failing.close()
        site.start()
        async with asyncio.timeout(6):
            assert len((await (await bus.consume(Q, 1)).next()).data) == INLINE_BYTES_MAX + 1
    finally:
        await site.close()


async def _answer_502(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
    writer.close()
