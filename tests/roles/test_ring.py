"""The ring: what every role does with a delivery, a broker in trouble, and a stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.virtual_time import in_virtual_time
from protocol.codec import encode
from protocol.errors import MessageTooLarge, StoreUnavailable
from protocol.messages import Task
from protocol.ports import Delivery, QueueDepth
from protocol.reasons import DeadReason
from protocol.subjects import Queue
from roles.ring import PAYLOAD_KEPT, Ring, cancelled
from tests.build import a_group, a_runspec, a_task, an_identity
from tests.ground import Ground, Handed

SPEC = a_runspec(sampling={"max_new_tokens": 5, "ack_wait_s": 3.0})


def a_frame(**changes: object) -> bytes:
    return encode(a_task(**changes), an_identity())


async def send(ground: Ground, *frames: bytes) -> None:
    for number, frame in enumerate(frames):
        await ground.bus().publish(Queue.TASK, frame, f"{number}")


def depth(ground: Ground) -> QueueDepth:
    return ground.run.queues[Queue.TASK].depth()


@in_virtual_time
async def test_a_message_of_the_run_is_received_with_its_signer(tmp_path: Path):
    ring = Ground(tmp_path, SPEC).ring()
    received = await ring.receive(Handed(a_frame()), Queue.TASK, Task)
    assert received is not None
    assert (received[0], received[1].signer) == (a_task(), an_identity().public_key)


@pytest.mark.parametrize(
    ("delivery", "reason", "group_id"),
    [
        (Handed(b"noise" * PAYLOAD_KEPT), DeadReason.UNDECODABLE, None),
        (Handed(encode(a_group(), an_identity())), DeadReason.UNDECODABLE, None),
        (Handed(a_frame(run="another")), DeadReason.WRONG_RUN, "learner-1.0"),
        (Handed(a_frame(), deliveries=6), DeadReason.TOO_MANY_DELIVERIES, "learner-1.0"),
    ],
)
@in_virtual_time
async def test_what_no_node_can_use_is_buried_with_its_reason(
    tmp_path: Path, delivery: Handed, reason: DeadReason, group_id: str | None
):
    ground = Ground(tmp_path, SPEC)
    assert await ground.ring().receive(delivery, Queue.TASK, Task) is None
    (letter,) = ground.dead
    assert (letter.reason, letter.group_id, letter.queue, letter.node) == (
        reason,
        group_id,
        "task",
        "learner-1",
    )
    assert letter.payload.tobytes() == delivery.data[:PAYLOAD_KEPT]
    assert delivery.said == ["reject"]
    delivery.said.clear()


@in_virtual_time
async def test_as_many_deliveries_as_allowed_are_received(tmp_path: Path):
    ring = Ground(tmp_path, SPEC).ring()
    assert await ring.receive(Handed(a_frame(), deliveries=5), Queue.TASK, Task) is not None


@in_virtual_time
async def test_a_message_leaves_the_ring_only_after_its_dead_letter_is_stored(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    bus, noise = ground.bus(), Handed(b"noise")
    bus.away = True
    burying = asyncio.ensure_future(ground.ring(bus=bus).receive(noise, Queue.TASK, Task))
    await ground.clock.sleep(5.0)
    assert (noise.said, ground.dead) == ([], [])
    bus.away = False
    await burying
    assert (noise.said, len(ground.dead)) == (["reject"], 1)


@in_virtual_time
async def test_sending_waits_through_absence_and_back_pressure(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    bus = ground.bus()
    bus.away = bus.full = True
    sending = asyncio.ensure_future(ground.ring(bus=bus).send(Queue.TASK, a_task(), "task:1"))
    await ground.clock.sleep(100.0)
    bus.away = False
    await ground.clock.sleep(100.0)
    assert not sending.done()
    bus.full = False
    await sending
    assert depth(ground) == QueueDepth(1, 0)


@in_virtual_time
async def test_persistence_ends_only_with_success_cancellation_or_an_error_that_repeating_cannot_heal(
    tmp_path: Path,
):
    ring = Ground(tmp_path, SPEC).ring()
    calls = 0

    async def fail() -> None:
        nonlocal calls
        calls += 1
        raise StoreUnavailable("away")

    trying = asyncio.ensure_future(ring.persist(fail))
    await ring.clock.sleep(300.0)
    assert 60 < calls < 120, "every five seconds, about"
    await cancelled(trying)
    assert trying.cancelled()

    async def refuse() -> None:
        raise MessageTooLarge("64 MB")

    with pytest.raises(MessageTooLarge):
        await ring.persist(refuse)


@in_virtual_time
async def test_peers_do_not_retry_in_step(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)

    async def third_try(ring: Ring) -> float:
        left = 3

        async def fail() -> float:
            nonlocal left
            left -= 1
            if left:
                raise StoreUnavailable("away")
            return ring.clock.monotonic()

        return await ring.persist(fail)

    nodes = [f"sampler-{number}" for number in range(10)]
    times = await asyncio.gather(*(third_try(ground.ring(node)) for node in nodes))
    assert len(set(times)) == len(nodes)


@in_virtual_time
async def test_signs_of_life_come_at_a_third_of_ack_wait_and_end_with_the_work(tmp_path: Path):
    ring, delivery = Ground(tmp_path, SPEC).ring(), Handed()
    async with ring.alive(delivery):
        await ring.clock.sleep(3.5)
    assert delivery.said == ["in_progress"] * 3
    await ring.clock.sleep(10.0)
    assert delivery.said == ["in_progress"] * 3


class Handler:
    """Takes as long as it is told; remembers what came of each delivery."""

    def __init__(self, ring: Ring, seconds: float) -> None:
        self._ring = ring
        self._seconds = seconds
        self.begun, self.finished, self.cancelled = 0, 0, 0

    async def __call__(self, delivery: Delivery, queue: Queue) -> None:
        self.begun += 1
        try:
            async with self._ring.alive(delivery):
                await self._ring.clock.sleep(self._seconds)
            await delivery.ack()
            self.finished += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            await delivery.release()
            raise


async def taken(
    ground: Ground, seconds: float, *, stop_after_s: float, drain_s: float
) -> tuple[Handler, float]:
    """Three deliveries at once, a stop, and how long the drain took."""
    await send(ground, *(a_frame(group_id=f"learner-1.{n}") for n in range(3)))
    ring, stop = ground.ring(), asyncio.Event()
    handler = Handler(ring, seconds)
    taking = asyncio.ensure_future(ring.take_each(Queue.TASK, 8, handler, stop, drain_s))
    await ground.clock.sleep(stop_after_s)
    stop.set()
    began = ground.clock.monotonic()
    await taking
    return handler, ground.clock.monotonic() - began


@in_virtual_time
async def test_deliveries_are_handled_at_once_and_finish_in_the_time_to_drain(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    handler, took_s = await taken(ground, 6.0, stop_after_s=1.0, drain_s=30.0)
    assert (handler.begun, handler.finished, handler.cancelled) == (3, 3, 0)
    assert took_s == pytest.approx(5.0)
    assert depth(ground).total == 0


@in_virtual_time
async def test_what_does_not_finish_in_the_time_to_drain_is_cancelled_and_handed_back(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    handler, took_s = await taken(ground, 60.0, stop_after_s=1.0, drain_s=2.0)
    assert (handler.finished, handler.cancelled) == (0, 3)
    assert took_s == pytest.approx(2.0)
    assert [m.due for m in ground.run.queues[Queue.TASK]._taken.values()] == [ground.clock.monotonic()] * 3


@in_virtual_time
async def test_nothing_is_taken_after_a_stop(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    await taken(ground, 60.0, stop_after_s=1.0, drain_s=0.0)
    await send(ground, a_frame(group_id="learner-1.9"))
    await ground.clock.sleep(1.0)
    assert depth(ground) == QueueDepth(0, 3)


@in_virtual_time
async def test_a_stop_before_the_broker_answers_ends_at_once(tmp_path: Path):
    ground, stop = Ground(tmp_path, SPEC), asyncio.Event()
    bus = ground.bus()
    bus.away = True
    ring = ground.ring(bus=bus)
    taking = asyncio.ensure_future(ring.take_each(Queue.TASK, 8, Handler(ring, 1.0), stop, 30.0))
    await ground.clock.sleep(20.0)
    stop.set()
    await taking
    assert ground.clock.monotonic() == pytest.approx(20.0)


@in_virtual_time
async def test_a_fault_of_our_own_ends_the_role(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    await send(ground, a_frame())

    async def broken(delivery: Delivery, queue: Queue) -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await ground.ring().take_each(Queue.TASK, 8, broken, asyncio.Event(), 1.0)


@in_virtual_time
async def test_telemetry_never_fails_the_work_it_tells_of(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    bus = ground.bus()
    ring = ground.ring(bus=bus)
    await ring.tell("group_rejected", reason="x" * 100_000, reward=float("nan"), accepted=7)
    (fields,) = ground.told("group_rejected")
    assert len(str(fields["reason"])) == 500
    assert {key: value for key, value in fields.items() if key != "reason"} == {"accepted": 7}
    bus.away = True
    await ring.tell("group_verified", accepted=1)
