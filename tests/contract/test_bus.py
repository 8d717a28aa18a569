"""The contract of every bus, first half: queues, telemetry and dead letters."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import BackPressure, BrokerAbsent, MessageTooLarge
from protocol.limits import EVENT_BYTES_MAX, FRAME_BYTES_MAX, INLINE_BYTES_MAX
from protocol.ports import QueueDepth
from protocol.subjects import Queue
from tests.contract.brokers import ACK_WAIT_S, Hub, eventually, nothing_within, soon

Q = Queue.ROLLOUT


# --- a message is handed out until it is acknowledged --------------------------------------------


async def test_a_message_reaches_one_taker_and_is_gone_once_acknowledged(hub: Hub):
    bus, other = await hub.bus("node-1"), await hub.bus("node-2")
    await bus.publish(Q, b"hello", "m1")
    consumer = await other.consume(Q, credit=4)
    delivery = await soon(consumer)
    assert (delivery.data, delivery.deliveries) == (b"hello", 1)
    assert await other.depth(Q) == QueueDepth(pending=0, unacknowledged=1)
    await delivery.ack()
    assert (await other.depth(Q)).total == 0


async def test_takers_share_a_queue_and_each_message_goes_to_one(hub: Hub):
    bus = await hub.bus()
    takers = [await (await hub.bus(f"taker-{i}")).consume(Q, credit=2) for i in range(2)]
    for number in range(8):
        await bus.publish(Q, b"%d" % number, f"m{number}")
    seen: list[int] = []
    while len(seen) < 8:
        waiting = [asyncio.ensure_future(taker.next()) for taker in takers]
        await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            if not isinstance(result, BaseException):
                seen.append(int(result.data))
                await result.ack()
    assert sorted(seen) == list(range(8))


async def test_queues_do_not_mix(hub: Hub):
    bus = await hub.bus()
    for queue in Queue:
        await bus.publish(queue, queue.encode(), "m1")
    for queue in Queue:
        assert (await soon(await bus.consume(queue, 1))).data == queue.encode()


async def test_a_job_longer_than_ack_wait_is_handed_out_again(hub: Hub):
    bus, other = await hub.bus("node-1"), await hub.bus("node-2")
    await bus.publish(Q, b"job", "m1")
    slow = await soon(await bus.consume(Q, 1))
    again = await soon(await other.consume(Q, 1))
    assert (again.data, again.deliveries) == (b"job", 2)
    await slow.ack()  # late, and still accepted
    await eventually(lambda: _is_empty(bus))


async def test_signs_of_life_keep_a_job_with_its_taker(hub: Hub):
    bus, other = await hub.bus("node-1"), await hub.bus("node-2")
    await bus.publish(Q, b"job", "m1")
    slow = await soon(await bus.consume(Q, 1))
    rival = await other.consume(Q, 1)
    for _ in range(6):  # 1.2 s in all
        await slow.in_progress()
        assert await nothing_within(rival, ACK_WAIT_S * 0.4)
    await slow.ack()
    assert await nothing_within(rival, ACK_WAIT_S * 1.5)


async def test_a_released_message_goes_to_somebody_else_at_once(hub: Hub):
    bus = await hub.bus()
    await bus.publish(Q, b"job", "m1")
    consumer = await bus.consume(Q, 1)
    await (await soon(consumer)).release()
    async with asyncio.timeout(ACK_WAIT_S * 0.8):
        assert (await consumer.next()).deliveries == 2


async def test_a_release_with_a_delay_waits_so_long(hub: Hub):
    bus = await hub.bus()
    await bus.publish(Q, b"job", "m1")
    consumer = await bus.consume(Q, 1)
    await (await soon(consumer)).release(delay_s=1.0)
    assert await nothing_within(consumer, 0.8)
    assert (await soon(consumer)).deliveries == 2


async def test_a_rejected_message_never_comes_back(hub: Hub):
    bus = await hub.bus()
    await bus.publish(Q, b"poison", "m1")
    consumer = await bus.consume(Q, 1)
    await (await soon(consumer)).reject()
    assert await nothing_within(consumer, ACK_WAIT_S * 1.5)
    assert await _is_empty(bus)


# --- credit, waiting and leaving -----------------------------------------------------------------


async def test_a_delivery_that_is_free_makes_room_and_can_still_be_settled(hub: Hub):
    bus = await hub.bus()
    for number in range(2):
        await bus.publish(Q, b"%d" % number, f"id-{number}")
    consumer = await bus.consume(Q, credit=1)
    first = await consumer.next()
    first.free()
    second = await consumer.next()
    assert (first.data, second.data) == (b"0", b"1")
    await second.ack()
    await first.ack()
    assert (await bus.depth(Q)).total == 0


async def test_no_more_than_credit_deliveries_are_unsettled(hub: Hub):
    bus = await hub.bus()
    for number in range(5):
        await bus.publish(Q, b"%d" % number, f"m{number}")
    consumer = await bus.consume(Q, credit=2)
    first, second = await soon(consumer), await soon(consumer)
    await first.in_progress()
    await second.in_progress()
    assert await nothing_within(consumer, ACK_WAIT_S * 0.5)
    await first.ack()
    assert (await soon(consumer)).data == b"2"


async def test_a_cancelled_next_loses_nothing(hub: Hub):
    bus = await hub.bus()
    consumer = await bus.consume(Q, credit=2)
    for _ in range(5):
        waiting = asyncio.ensure_future(consumer.next())
        await asyncio.sleep(0)
        waiting.cancel()
    await bus.publish(Q, b"kept", "m1")
    assert (await soon(consumer)).data == b"kept"


async def test_closing_gives_back_what_was_not_handed_out(hub: Hub):
    bus, other = await hub.bus("node-1"), await hub.bus("node-2")
    for number in range(4):
        await bus.publish(Q, b"%d" % number, f"m{number}")
    leaver = await bus.consume(Q, credit=4)
    held = await soon(leaver)
    await held.in_progress()
    await leaver.close()
    successor = await other.consume(Q, credit=4)
    async with asyncio.timeout(ACK_WAIT_S * 0.8):  # sooner than ack_wait would give them back
        rest = {(await successor.next()).data for _ in range(3)}
    assert rest == {b"0", b"1", b"2", b"3"} - {held.data}


async def test_waiting_on_a_closed_consumer_ends(hub: Hub):
    consumer = await (await hub.bus()).consume(Q, 1)
    waiting = [asyncio.ensure_future(consumer.next()) for _ in range(2)]
    await asyncio.sleep(0)
    await consumer.close()
    for task in waiting:
        with pytest.raises(BrokerAbsent):
            async with asyncio.timeout(5):
                await task


# --- publishing ----------------------------------------------------------------------------------


async def test_a_resent_message_is_stored_once(hub: Hub):
    bus = await hub.bus()
    for _ in range(3):
        await bus.publish(Q, b"once", "m1")
    assert (await bus.depth(Q)).total == 1
    await (await soon(await bus.consume(Q, 1))).ack()
    await bus.publish(Q, b"once", "m1")  # even after the first copy is gone
    assert (await bus.depth(Q)).total == 0


async def test_a_full_queue_tells_publishers_to_wait(hub: Hub):
    bus = await hub.bus(messages_max=2)
    await bus.publish(Q, b"1", "m1")
    await bus.publish(Q, b"2", "m2")
    with pytest.raises(BackPressure):
        await bus.publish(Q, b"3", "m3")
    await (await soon(await bus.consume(Q, 1))).ack()
    await bus.publish(Q, b"3", "m3")


@pytest.mark.parametrize("size", [INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 3 << 20])
async def test_a_payload_of_any_allowed_size_arrives_whole(hub: Hub, size: int):
    bus = await hub.bus()
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    await bus.publish(Q, data, "m1")
    consumer = await bus.consume(Q, 2)
    delivery = await soon(consumer)
    assert delivery.data == data
    await delivery.release()
    again = await soon(consumer)
    assert again.data == data
    await again.ack()
    await eventually(lambda: _is_empty(bus))


async def test_what_exceeds_the_protocol_is_refused_and_the_bus_goes_on(hub: Hub):
    bus = await hub.bus()
    with pytest.raises(MessageTooLarge):
        await bus.publish(Q, bytes(FRAME_BYTES_MAX + 1), "m1")
    with pytest.raises(MessageTooLarge):
        await bus.emit("sampler", "node-1", bytes(EVENT_BYTES_MAX + 1))
    with pytest.raises(MessageTooLarge):
        await bus.bury(bytes(2 << 20))
    await bus.publish(Q, b"fine", "m2")
    assert (await soon(await bus.consume(Q, 1))).data == b"fine"


@pytest.mark.parametrize("message_id", ["", "two words", "line\nbreak", "x" * 300])
async def test_a_message_id_that_no_header_could_carry_is_our_bug(hub: Hub, message_id: str):
    with pytest.raises(ValueError):
        await (await hub.bus()).publish(Q, b"", message_id)


async def test_a_run_that_was_never_created_is_an_absent_broker(hub: Hub):
    bus = await hub.stranger()
    assert not await bus.exists()
    with pytest.raises(BrokerAbsent):
        await bus.publish(Q, b"", "m1")
    with pytest.raises(BrokerAbsent):
        await bus.consume(Q, 1)
    await bus.create_run(hub.spec)
    await bus.publish(Q, b"kept", "m1")
    await bus.create_run(hub.spec)  # again is harmless
    assert await bus.exists()
    assert (await bus.depth(Q)).total == 1


# --- telemetry and dead letters ------------------------------------------------------------------


async def test_a_replay_continues_with_live_events_without_gap_or_repetition(hub: Hub):
    bus, reader = await hub.bus("node-1"), await hub.bus("node-2")
    for number in range(5):
        await bus.emit("sampler", "node-1", b"old %d" % number)
    events = reader.events(replay=True)
    async with asyncio.timeout(10):
        old = [await anext(events) for _ in range(5)]
        for number in range(5):
            await bus.emit("learner", "node-1", b"new %d" % number)
        new = [await anext(events) for _ in range(5)]
    assert old == [b"old %d" % n for n in range(5)]
    assert new == [b"new %d" % n for n in range(5)]


async def test_without_replay_the_past_is_not_told(hub: Hub):
    bus = await hub.bus()
    await bus.emit("sampler", "node-1", b"old")
    async with asyncio.timeout(10):
        assert await anext(bus.events(replay=True)) == b"old"
        live = asyncio.ensure_future(anext(bus.events(replay=False)))

        async def heard() -> bool:
            await bus.emit("sampler", "node-1", b"new")
            return live.done()

        await eventually(heard)
        assert await live == b"new"


async def test_dead_letters_are_kept_for_a_person(hub: Hub):
    bus = await hub.bus()
    assert list(await bus.dead_letters()) == []
    for number in range(3):
        await bus.bury(b"%d" % number)
    assert list(await bus.dead_letters()) == [b"0", b"1", b"2"]


async def test_a_bus_that_was_closed_says_so(hub: Hub):
    bus = await hub.bus()
    await bus.close()
    with pytest.raises(BrokerAbsent):
        await bus.publish(Q, b"", "m1")
    await bus.emit("sampler", "node-1", b"telemetry never raises")


async def _is_empty(bus: object) -> bool:
    return (await bus.depth(Q)).total == 0  # type: ignore[attr-defined,no-any-return]
