"""What a node observes when its broker comes back with an empty disk, on either broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from node.run_bus import RunBus
from protocol.errors import BrokerAbsent, WrongRevision
from protocol.ports import Entry, Write
from protocol.subjects import Bucket, Queue, head_key
from tests.contract.brokers import nothing_within, soon
from tests.contract.outages import ACK_WAIT_S, SPEC, Place, back, is_depth

Q, B = Queue.ROLLOUT, Bucket.POLICY
HEAD = head_key("learner-1")


async def test_a_broker_without_its_disk_has_no_run_until_somebody_creates_it(place: Place, bus: RunBus):
    await bus.publish(Q, b"old", "m1")
    held = await soon(await bus.consume(Q, 1))
    await place.kill()
    await place.start(empty=True)
    await back(bus)
    assert not await bus.exists()
    calls: list[Callable[[], Awaitable[object]]] = [
        held.ack,
        bus.dead_letters,
        partial(bus.depth, Q),
        partial(bus.get, B, HEAD),
        partial(bus.list, B, "head"),
        partial(bus.consume, Q, 1),
        partial(bus.publish, Q, b"", "m9"),
        partial(bus.publish, Q, bytes(1 << 20), "m9"),
        partial(bus.put, B, HEAD, b"", expected=0),
        partial(bus.delete, B, HEAD),
        partial(bus.commit, B, [Write("done.g", b"", 0), Write(HEAD, b"", 0)]),
        partial(bus.bury, b""),
        partial(anext, bus.events(replay=True)),
        partial(anext, bus.events(replay=False)),
    ]
    for call in calls:
        with pytest.raises(BrokerAbsent):
            await call()
    await held.in_progress()
    await held.release()
    await bus.emit("sampler", "node-1", b"dropped")


async def test_whoever_was_connected_goes_on_with_the_run_that_was_created_again(place: Place, bus: RunBus):
    other = await place.bus("node-2")
    idle, busy = await other.consume(Queue.TASK, 2), await other.consume(Q, 1)
    heads, events = other.announcements(), other.events(replay=True)
    await bus.emit("sampler", "node-1", b"old event")
    await bus.publish(Q, b"old", "m1")
    held = await soon(busy)
    waiting = asyncio.ensure_future(idle.next())
    async with asyncio.timeout(10):
        assert await anext(events) == b"old event"
    await place.kill()
    await place.start(empty=True)
    await back(other)
    assert await nothing_within(busy, 0.3)
    await bus.create_run(SPEC)
    await bus.publish(Queue.TASK, b"task", "m1")
    await bus.publish(Q, b"new", "m1")  # no id of an earlier life is remembered
    await bus.emit("sampler", "node-1", b"new event")
    revision = await bus.commit(B, [Write("done.g1", b"", 0), Write(HEAD, b"h", 0)])
    async with asyncio.timeout(10):
        assert (await waiting).data == b"task"
        assert await anext(heads) == Entry(HEAD, b"h", revision)
        assert await anext(events) == b"new event"
    await held.release()
    delivery = await soon(busy)
    assert (delivery.data, delivery.deliveries) == (b"new", 1)
    await delivery.ack()


async def test_nothing_of_an_earlier_life_meets_the_run_that_was_created_again(place: Place, bus: RunBus):
    """Sequences and revisions of two lives differ: an old acknowledgement must not remove a new message."""
    await bus.publish(Q, b"old", "m1")
    old_revision = await bus.put(B, HEAD, b"old")
    held = await soon(await bus.consume(Q, 1))
    await place.kill()
    await place.start(empty=True)
    await back(bus)
    await bus.create_run(SPEC)
    await bus.publish(Q, b"new", "m1")
    new = await soon(await (await place.bus("node-2")).consume(Q, 1))
    await held.in_progress()
    await held.release()
    await held.reject()
    await held.ack()
    assert await is_depth(bus, 0, 1)
    again = await soon(await (await place.bus("node-3")).consume(Q, 1))
    assert again.data == new.data == b"new"
    assert await bus.put(B, HEAD, b"new", expected=0) > old_revision
    with pytest.raises(WrongRevision):
        await bus.put(B, HEAD, b"mine", expected=old_revision)


async def test_a_consumer_asks_calmly_while_there_is_no_run(place: Place, bus: RunBus):
    consumer = await bus.consume(Q, 1)
    await place.kill()
    await place.start(empty=True)
    await back(bus)
    before = getattr(consumer, "_requests", 0)
    assert await nothing_within(consumer, 2 * ACK_WAIT_S)
    assert getattr(consumer, "_requests", 0) - before < 30
