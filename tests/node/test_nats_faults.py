"""The bus when its broker is killed, stopped, restarted, small, or has lost a payload."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node.broker import Broker, BrokerOptions, start_broker
from node.broker_access import BrokerAccess
from node.nats_bus import NatsBus
from node.nats_pull import NatsConsumer, Receipt
from node.nats_setup import list_runs
from protocol.errors import BrokerAbsent, BusError, MessageTooLarge, UnknownOutcome
from protocol.limits import INLINE_BYTES_MAX
from protocol.ports import Delivery, Write
from protocol.subjects import Bucket, Queue, head_key
from tests.build import RUN, a_runspec

Q = Queue.ROLLOUT
ACK_WAIT_S = 1.0
BACK_WITHIN_S = 5.0
SPEC = a_runspec(sampling={"max_new_tokens": 5, "ack_wait_s": ACK_WAIT_S})
KILLS = pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])


class Site:
    """A broker that can be ended and started again, with the run on it."""

    def __init__(self, directory: Path, **options: object) -> None:
        self._directory = directory
        self._options = BrokerOptions(**options)  # type: ignore[arg-type]
        self._buses: list[NatsBus] = []
        self.broker = self.start()

    def start(self) -> Broker:
        self.broker = start_broker(self._directory, options=self._options)
        return self.broker

    def end(self, how: signal.Signals) -> None:
        assert self.broker.process is not None
        self.broker.process.send_signal(how)
        self.broker.process.wait()

    def freeze(self) -> None:
        assert self.broker.process is not None
        self.broker.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.broker.process is not None
        self.broker.process.send_signal(signal.SIGCONT)

    async def bus(self, node: str = "node-1", access: BrokerAccess | None = None) -> NatsBus:
        bus = await NatsBus.connect(access or self.broker.access, RUN, node=node)
        self._buses.append(bus)
        await bus.create_run(SPEC)
        return bus

    async def close(self) -> None:
        self.thaw()
        for bus in self._buses:
            await bus.close()
        self.broker.stop()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path / "broker")
    yield site
    await site.close()


async def soon(consumer: NatsConsumer, within_s: float = 10.0) -> Delivery:
    async with asyncio.timeout(within_s):
        return await consumer.next()


# --- restarts ------------------------------------------------------------------------------------


@KILLS
async def test_after_a_restart_everything_works_again_within_five_seconds(site: Site, how: signal.Signals):
    bus, other = await site.bus("node-1"), await site.bus("node-2")
    heads = other.announcements()
    consumer = await other.consume(Q, credit=2)
    for number in range(6):
        await bus.publish(Q, b"%d" % number, f"m{number}")
    acknowledged, held = await soon(consumer), await soon(consumer)
    await acknowledged.ack()
    site.end(how)
    site.start()
    async with asyncio.timeout(BACK_WITHIN_S):
        # Nobody has noticed the restart yet: what is asked now breaks with the old connection.
        await _persist(lambda: bus.put(Bucket.POLICY, head_key("learner-1"), b"1"))
        assert (await anext(heads)).value == b"1"
    await held.ack()  # settled under the new connection
    rest = []
    while len(rest) < 4:
        delivery = await soon(consumer)
        await delivery.ack()
        rest.append(delivery.data)
    assert {*rest, acknowledged.data, held.data} == {b"%d" % n for n in range(6)}
    assert (await bus.depth(Q)).total == 0


@KILLS
async def test_a_taker_that_waits_is_served_after_a_restart(site: Site, how: signal.Signals):
    bus = await site.bus()
    waiting = asyncio.ensure_future((await bus.consume(Q, credit=1)).next())
    site.end(how)
    site.start()
    await _persist(lambda: bus.publish(Q, b"after", "m1"))
    async with asyncio.timeout(BACK_WITHIN_S):
        assert (await waiting).data == b"after"


async def test_what_was_confirmed_survives_kills_and_arrives(site: Site):
    bus, other = await site.bus("node-1"), await site.bus("node-2")
    confirmed: set[bytes] = set()
    received: set[bytes] = set()
    done = asyncio.Event()

    async def produce() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            data = b"%d" % number
            await _persist(lambda data=data: bus.publish(Q, data, f"m{data.decode()}"))  # type: ignore[misc]
            confirmed.add(data)

    async def consume() -> None:
        consumer = await other.consume(Q, credit=8)
        while not (done.is_set() and confirmed <= received):
            delivery = await soon(consumer)
            received.add(delivery.data)
            await _persist(delivery.ack, tries=1)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(produce())
        group.create_task(consume())
        for _ in range(2):
            before = len(confirmed)
            while len(confirmed) < before + 50:
                await asyncio.sleep(0)
            site.end(signal.SIGKILL)
            site.start()
        before = len(confirmed)
        while len(confirmed) < before + 50:
            await asyncio.sleep(0)
        done.set()
    assert confirmed <= received
    assert len(confirmed) >= 150


async def test_without_a_broker_every_call_ends_and_says_so(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.nats_link.CONNECTED_WAIT_S", 0.3)
    bus = await site.bus()
    consumer = await bus.consume(Q, credit=1)
    await bus.publish(Q, b"job", "m1")
    delivery = await soon(consumer)
    site.end(signal.SIGKILL)
    async with asyncio.timeout(10):
        for call in (
            lambda: bus.publish(Q, b"", "m2"),
            lambda: bus.get(Bucket.RUN, "spec"),
            lambda: bus.list(Bucket.POLICY, "head"),
            lambda: bus.put(Bucket.RUN, "spec", b""),
            lambda: bus.commit(Bucket.POLICY, [Write("done.g", b"", 0), Write("head.l", b"", 0)]),
            lambda: bus.depth(Q),
            lambda: bus.consume(Q, 1),
            delivery.ack,
        ):
            with pytest.raises(BusError):
                await call()
        await delivery.in_progress()
        await delivery.release()
        await bus.emit("sampler", "node-1", b"dropped")
        await consumer.close()
        await bus.close()


async def test_a_request_whose_connection_breaks_is_of_unknown_outcome_at_once(site: Site):
    bus = await site.bus()
    site.freeze()
    asked = asyncio.ensure_future(bus.put(Bucket.RUN, "key", b""))
    await asyncio.sleep(0)
    site.end(signal.SIGKILL)
    with pytest.raises(UnknownOutcome):
        async with asyncio.timeout(2):
            await asked
    site.start()
    async with asyncio.timeout(BACK_WITHIN_S):
        assert await bus.get(Bucket.RUN, "key") is None  # it was not sent again behind our back


async def test_a_broker_that_hangs_makes_writes_unknown_and_reads_absent(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    bus = await site.bus()
    site.freeze()
    monkeypatch.setattr("node.nats_link.READ_S", 0.2)
    link = bus._link
    with pytest.raises(UnknownOutcome):
        await link.request("anything", timeout_s=0.2)
    monkeypatch.setattr("node.nats_link.REQUEST_S", 0.2)
    with pytest.raises(BrokerAbsent):
        await bus.get(Bucket.RUN, "key")
    site.thaw()
    await bus.put(Bucket.RUN, "key", b"")


async def test_events_go_on_after_a_restart_without_repetition(site: Site):
    bus, other = await site.bus("node-1"), await site.bus("node-2")
    await bus.emit("sampler", "node-1", b"before")
    events = other.events(replay=True)
    async with asyncio.timeout(10):
        assert await anext(events) == b"before"
        site.end(signal.SIGKILL)
        site.start()
        await _persist(lambda: bus.put(Bucket.RUN, "key", b""))
        await bus.emit("sampler", "node-1", b"after")
        assert await anext(events) == b"after"
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_broker_that_lost_its_disk_is_an_absent_run_until_it_is_created_again(site: Site, tmp_path: Path):
    bus = await site.bus()
    consumer = await bus.consume(Q, credit=1)
    site.end(signal.SIGKILL)
    (tmp_path / "broker" / "jetstream").rename(tmp_path / "lost")
    site.start()
    with pytest.raises(BrokerAbsent):
        await _persist(lambda: bus.publish(Q, b"", "m1"), retry=UnknownOutcome)
    assert not await bus.exists()
    await bus.create_run(SPEC)
    await bus.publish(Q, b"again", "m1")
    assert (await soon(consumer)).data == b"again"


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
    await bus._link.api(f"STREAM.PURGE.OBJ_{bus._names.blob_bucket}")
    delivery = await soon(await bus.consume(Q, 1))
    assert delivery.data == b""
    await delivery.reject()


@pytest.mark.parametrize("reference", ["", "nonsense", "x" * 22 + " 99999999999 " + "0" * 64, "x" * 22 + " 5 " + "0" * 64])
async def test_a_forged_reference_is_delivered_as_undecodable(site: Site, reference: str):
    bus = await site.bus()
    await bus._link.store(bus._names.subject(Q), b"", {"Grpo-Blob": reference})
    assert (await soon(await bus.consume(Q, 1))).data == b""


async def test_a_damaged_payload_is_delivered_as_undecodable(site: Site):
    bus = await site.bus()
    ref = await bus._blobs.put(bytes(1000))
    forged = f"{ref.id} 1000 {'0' * 64}"
    await bus._link.store(bus._names.subject(Q), b"", {"Grpo-Blob": forged})
    assert (await soon(await bus.consume(Q, 1))).data == b""


async def test_an_acknowledged_payload_leaves_no_bytes_behind(site: Site):
    bus = await site.bus()
    for _ in range(2):  # the second one is a resend
        await bus.publish(Q, bytes(INLINE_BYTES_MAX + 1), "m1")
    await (await soon(await bus.consume(Q, 1))).ack()
    stored = f"STREAM.INFO.OBJ_{bus._names.blob_bucket}"
    async with asyncio.timeout(10):
        while (await bus._link.read_api(stored))["state"]["bytes"] > 1000:
            pass


# --- the rest ------------------------------------------------------------------------------------


async def test_runs_on_a_broker_are_listed(site: Site):
    await site.bus()
    bus = await NatsBus.connect(site.broker.access, "another-run", node="node-2")
    await bus.create_run(SPEC.model_copy(update={"name": "another-run"}))
    await bus.close()
    assert await list_runs(site.broker.access) == ["another-run", RUN]


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
        async with asyncio.timeout(BACK_WITHIN_S + 1):
            assert len((await (await bus.consume(Q, 1)).next()).data) == INLINE_BYTES_MAX + 1
    finally:
        await site.close()


async def _answer_502(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
    writer.close()


async def _persist(call: object, tries: int = 100, retry: type[BusError] = BusError) -> None:
    """What a role does: try again until it works."""
    for _ in range(tries):
        try:
            await call()  # type: ignore[operator]
        except retry:
            await asyncio.sleep(0)
        else:
            return


