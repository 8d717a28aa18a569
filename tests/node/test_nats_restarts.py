"""The bus when its broker is killed, stopped, frozen and started again."""

from __future__ import annotations

import asyncio
import itertools
import signal
from functools import partial
from pathlib import Path

import pytest

from protocol.errors import BrokerAbsent, BusError, UnknownOutcome
from protocol.ports import Write
from protocol.subjects import Bucket, Queue, head_key
from tests.node.sites import SPEC, Site, persist, soon

Q = Queue.ROLLOUT
BACK_WITHIN_S = 5.0
KILLS = pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])


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
        await other.exists()  # announcements are lossy: the listener must be back before the head is
        await persist(lambda: bus.put(Bucket.POLICY, head_key("learner-1"), b"1"))
        assert (await anext(heads)).value == b"1"
    await held.ack()  # settled under the new connection
    settled = {acknowledged.data, held.data}
    while len(settled) < 6:
        delivery = await soon(consumer)  # a killed broker may repeat even what was acknowledged
        await delivery.ack()
        settled.add(delivery.data)
    assert settled == {b"%d" % n for n in range(6)}


@KILLS
async def test_a_taker_that_waits_is_served_after_a_restart(site: Site, how: signal.Signals):
    bus = await site.bus()
    waiting = asyncio.ensure_future((await bus.consume(Q, credit=1)).next())
    site.end(how)
    site.start()
    await persist(lambda: bus.publish(Q, b"after", "m1"))
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
            await persist(partial(bus.publish, Q, data, f"m{number}"))
            confirmed.add(data)

    async def consume() -> None:
        consumer = await other.consume(Q, credit=8)
        while not (done.is_set() and confirmed <= received):
            delivery = await soon(consumer)
            received.add(delivery.data)
            await persist(delivery.ack, tries=1)

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
        await persist(lambda: bus.put(Bucket.RUN, "key", b""))
        await bus.emit("sampler", "node-1", b"after")
        assert await anext(events) == b"after"
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_broker_that_lost_its_disk_has_no_run_until_it_is_created_again(site: Site, tmp_path: Path):
    bus = await site.bus()
    consumer = await bus.consume(Q, credit=1)
    site.end(signal.SIGKILL)
    (tmp_path / "broker" / "jetstream").rename(tmp_path / "lost")
    site.start()
    with pytest.raises(BrokerAbsent):
        await persist(lambda: bus.publish(Q, b"", "m1"), retry=UnknownOutcome)
    assert not await bus.exists()
    await bus.create_run(SPEC)
    await bus.publish(Q, b"again", "m1")
    assert (await soon(consumer)).data == b"again"
