"""What a node observes when its broker is killed or loses an answer, on either broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from node.memory_broker import UNSAVED_S
from node.run_bus import RunBus
from node.system_clock import SystemClock
from protocol.errors import BrokerAbsent, UnknownOutcome, WrongRevision
from protocol.ports import Entry, QueueDepth, Write
from protocol.subjects import Bucket, Queue, head_key
from tests.contract.brokers import eventually, nothing_within, soon
from tests.contract.outages import SPEC, ModelPlace, Place, back, is_depth

Q, B = Queue.ROLLOUT, Bucket.POLICY
HEAD = head_key("learner-1")
PUB_ACK = b'"seq"'


# --- a restart -----------------------------------------------------------------------------------


async def test_a_killed_broker_keeps_messages_keys_and_revisions(place: Place, bus: RunBus):
    for number in range(4):
        await bus.publish(Q, b"%d" % number, f"m{number}")
    consumer = await bus.consume(Q, 1)
    await (await soon(consumer)).ack()
    held = await soon(consumer)
    await bus.put(B, "deleted", b"")
    await bus.delete(B, "deleted")
    revision = await bus.commit(B, [Write("done.g1", b"", 0), Write(HEAD, b"h", 0)])
    await SystemClock().sleep(2 * UNSAVED_S)
    await place.kill()
    await place.start()
    await back(bus)
    assert await bus.get(B, HEAD) == Entry(HEAD, b"h", revision)
    assert list(await bus.list(B, "")) == ["done.g1", HEAD]
    with pytest.raises(WrongRevision):
        await bus.put(B, HEAD, b"x", expected=0)
    assert await bus.put(B, HEAD, b"i", expected=revision) == revision + 1
    assert await is_depth(bus, 2, 1)
    await held.ack()
    await consumer.close()
    last = await bus.consume(Q, 2)
    left = [await soon(last) for _ in range(2)]
    assert [(delivery.data, delivery.deliveries) for delivery in left] in (
        [(b"2", 1), (b"3", 1)],
        [(b"2", 2), (b"3", 1)],
    )


async def test_a_killed_broker_knows_the_ids_of_what_it_still_stores(place: Place, bus: RunBus):
    await bus.publish(Q, b"done", "m1")
    await bus.publish(Q, b"here", "m2")
    await (await soon(await bus.consume(Q, 1))).ack()
    await bus.publish(Q, b"done", "m1")
    assert (await bus.depth(Q)).total == 1
    await place.kill()
    await place.start()
    await back(bus)
    await bus.publish(Q, b"here", "m2")
    assert (await bus.depth(Q)).total == 1
    # A server that had not yet written down that m1 left knows its id, too; the model never does.
    await bus.publish(Q, b"done", "m1")
    assert (await bus.depth(Q)).total in ((2,) if isinstance(place, ModelPlace) else (1, 2))


async def test_a_broker_killed_at_once_forgets_what_it_handed_out_and_takes_the_acknowledgement_later(
    place: Place, bus: RunBus
):
    await bus.publish(Q, b"job", "m1")
    held = await soon(await bus.consume(Q, 1))
    await place.kill()
    await place.start()
    await back(bus)
    assert await bus.depth(Q) in (QueueDepth(1, 0), QueueDepth(0, 1))
    async with asyncio.timeout(10):
        await held.ack()  # answered once the message was handed out again
    assert await is_depth(bus, 0, 0)


async def test_what_was_handed_out_but_not_asked_for_goes_to_others_after_a_restart(
    place: Place, bus: RunBus
):
    for number in range(3):
        await bus.publish(Q, b"%d" % number, f"m{number}")
    await bus.consume(Q, 4)  # and never looks
    await eventually(lambda: is_depth(bus, 0, 3))
    await SystemClock().sleep(2 * UNSAVED_S)
    await place.kill()
    await place.start()
    await back(bus)
    other = await (await place.bus("node-2")).consume(Q, 4)
    seen = {(await soon(other)).data for _ in range(1)}
    assert seen <= {b"0", b"1", b"2"}


async def test_without_a_broker_reads_say_absent_and_writes_never_lie(
    place: Place, bus: RunBus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.nats_link.CONNECTED_WAIT_S", 0.2)
    monkeypatch.setattr("node.nats_link.READ_S", 0.2)
    for number in range(3):
        await bus.publish(Q, b"job", f"m{number}")
    consumer = await bus.consume(Q, 2)
    first, second = await soon(consumer), await soon(consumer)
    await place.kill()
    reads: list[Callable[[], Awaitable[object]]] = [
        bus.exists,
        bus.dead_letters,
        partial(bus.depth, Q),
        partial(bus.get, B, HEAD),
        partial(bus.list, B, "head"),
        partial(bus.consume, Q, 1),
    ]
    writes: list[Callable[[], Awaitable[object]]] = [
        first.ack,
        partial(bus.publish, Q, b"", "m9"),
        partial(bus.put, B, HEAD, b""),
        partial(bus.delete, B, HEAD),
        partial(bus.commit, B, [Write("done.g", b"", 0), Write(HEAD, b"", 0)]),
        partial(bus.bury, b""),
        partial(bus.create_run, SPEC),
    ]
    for read in reads:
        with pytest.raises(BrokerAbsent):
            await read()
    for write in writes:
        with pytest.raises((BrokerAbsent, UnknownOutcome)):
            await write()
    await second.in_progress()
    await second.release()
    await bus.emit("sampler", "node-1", b"dropped")
    assert await nothing_within(consumer, 0.1)


# --- an answer that is lost ----------------------------------------------------------------------


async def test_a_commit_whose_answer_is_lost_stands_and_is_not_sent_again(place: Place, bus: RunBus):
    writes = [Write("done.g1", b"", 0), Write(HEAD, b"h", 0)]
    await place.lose_answer(bus, PUB_ACK)
    with pytest.raises(UnknownOutcome):
        await bus.commit(B, writes)
    entry = await bus.get(B, HEAD)
    assert entry is not None
    assert entry.value == b"h"
    with pytest.raises(WrongRevision):
        await bus.commit(B, writes)
    assert await bus.get(B, HEAD) == entry


async def test_a_put_whose_answer_is_lost_stands_and_is_not_sent_again(place: Place, bus: RunBus):
    await place.lose_answer(bus, PUB_ACK)
    with pytest.raises(UnknownOutcome):
        await bus.put(B, HEAD, b"h", expected=0)
    entry = await bus.get(B, HEAD)
    assert entry is not None
    with pytest.raises(WrongRevision):
        await bus.put(B, HEAD, b"h", expected=0)
    assert await bus.get(B, HEAD) == entry


async def test_a_message_whose_confirmation_is_lost_is_stored_once_however_often_it_is_sent(
    place: Place, bus: RunBus
):
    await place.lose_answer(bus, PUB_ACK)
    with pytest.raises(UnknownOutcome):
        await bus.publish(Q, b"job", "m1")
    assert (await bus.depth(Q)).total == 1
    await bus.publish(Q, b"job", "m1")
    assert (await bus.depth(Q)).total == 1


async def test_an_acknowledgement_whose_answer_is_lost_is_repeated_until_it_is_confirmed(
    place: Place, bus: RunBus
):
    await bus.publish(Q, b"job", "m1")
    delivery = await soon(await bus.consume(Q, 1))
    await place.lose_answer(bus, b"MSG ")
    async with asyncio.timeout(10):
        await delivery.ack()
    assert await is_depth(bus, 0, 0)
