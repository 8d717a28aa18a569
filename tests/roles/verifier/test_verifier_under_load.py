"""The verifier's loop when scoring is slow, the queue is full, or the node has to stop."""

from __future__ import annotations

import asyncio
from typing import Any

from node.memory_bus import MemoryBus
from protocol.ports import Delivery
from protocol.subjects import Queue
from tests.build import a_group, a_rollout, a_task
from tests.roles.verifier.stage import PATIENCE_S, FullBus, HeldScorer, Stage


async def test_a_group_that_takes_long_delays_no_other():
    stage, scorer = Stage(), HeldScorer()
    async with stage.verifier(scorer):
        await stage.put(a_group())
        await scorer.began.wait()
        quick = a_task(group_id="learner-1.1")
        await stage.put(
            a_group(quick, rollouts=tuple(a_rollout(index=i, token_ids=[5, 4, 2]) for i in range(2)))
        )
        assert (await stage.out()).group_id == "learner-1.1"
        scorer.go_on.set()
        assert (await stage.out()).group_id == "learner-1.0"


async def test_long_scoring_keeps_its_message():
    stage, scorer = Stage(ack_wait_s=0.3), HeldScorer()
    beats = _count_beats(stage.bus)
    async with stage.verifier(scorer):
        await stage.put(a_group())
        for _ in range(4):  # longer than ack_wait: four beats at a third of it
            await beats.get()
        assert (await stage.hand.depth(Queue.ROLLOUT)).unacknowledged == 1
        other = await stage.hand.consume(Queue.ROLLOUT, 1)
        taken = asyncio.ensure_future(other.next())
        await beats.get()
        assert not taken.done()
        taken.cancel()
        scorer.go_on.set()
        await stage.out()


def _count_beats(bus: MemoryBus) -> asyncio.Queue[None]:
    """A queue that gets an entry for each sign of life sent over ``bus``."""
    beats: asyncio.Queue[None] = asyncio.Queue()
    consume = bus.consume

    async def counted(queue: Queue, credit: int) -> Any:
        consumer = await consume(queue, credit)
        take = consumer.next

        async def next_counted() -> Delivery:
            delivery = await take()
            beat = delivery.in_progress

            async def in_progress() -> None:
                await beat()
                beats.put_nowait(None)

            delivery.in_progress = in_progress  # type: ignore[method-assign]
            return delivery

        consumer.next = next_counted  # type: ignore[method-assign,assignment]
        return consumer

    bus.consume = counted  # type: ignore[method-assign]
    return beats


async def test_back_pressure_delays_a_group_and_loses_none():
    stage = Stage(make_bus=FullBus)
    async with stage.verifier():
        await stage.put(a_group())
        assert (await stage.out()).group_id == "learner-1.0"
    assert (await stage.hand.depth(Queue.ROLLOUT)).total == 0


async def test_a_stop_finishes_what_is_in_hand():
    stage, scorer = Stage(), HeldScorer()
    async with stage.verifier(scorer):
        await stage.put(a_group())
        await scorer.began.wait()
        stage.stop.set()
        scorer.go_on.set()
        assert (await stage.out()).group_id == "learner-1.0"
    assert (await stage.hand.depth(Queue.ROLLOUT)).total == 0


async def test_a_stop_hands_back_what_does_not_finish_in_time():
    stage, scorer = Stage(), HeldScorer()
    async with stage.verifier(scorer, drain_s=0.05) as verifier:
        await stage.put(a_group())
        await scorer.began.wait()
    assert verifier.busy == 0
    consumer = await stage.hand.consume(Queue.ROLLOUT, 1)
    again = await asyncio.wait_for(consumer.next(), PATIENCE_S)
    assert again.deliveries == 2
    assert (await stage.hand.depth(Queue.VERIFIED)).total == 0


async def test_a_redelivered_group_is_verified_again_under_the_same_id():
    stage = Stage()
    async with stage.verifier():
        await stage.put(a_group(), message_id="first")
        await stage.out()
        await stage.put(a_group(), message_id="again")
        await stage.put(a_group(a_task(group_id="learner-1.1")))
        assert (await stage.out()).group_id == "learner-1.1"  # the broker knew the id of the second
