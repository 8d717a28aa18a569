"""The collector: what becomes of a delivery, and that nothing in hand is ever silent for long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS
from protocol.codec import encode
from protocol.messages import VerifiedGroup
from protocol.ports import QueueDepth
from protocol.reasons import DeadReason, DropReason
from protocol.subjects import Bucket, Queue, done_key
from roles.learner.buffer import Buffer
from roles.learner.collector import Collector
from roles.policy.compose import Factors
from roles.policy.policies import Policies
from tests.build import a_clock, a_group, a_rollout, a_runspec, a_task, a_verified_group, an_identity
from tests.ground import FaultyBus, Ground, running

ACK_WAIT_S = 3.0


@dataclass
class Scene:
    """A collector and its buffer, with genesis claimed."""

    ground: Ground
    bus: FaultyBus
    buffer: Buffer
    collector: Collector
    genesis: Factors
    troubles: list[StoreFault | None]

    @classmethod
    async def at(cls, directory: Path) -> Scene:
        spec = a_runspec(sampling={"max_new_tokens": 5, "ack_wait_s": ACK_WAIT_S})
        ground = Ground(directory, spec)
        genesis = await ground.claim_genesis()
        bus, buffer = ground.bus(), Buffer(4)
        troubles: list[StoreFault | None] = []
        ring = ground.ring(bus=bus)
        store = ground.store(lambda _operation, _path: troubles.pop(0) if troubles else None)
        policies = Policies(ring, store, ground.offload)
        await policies.start()
        return cls(ground, bus, buffer, Collector(ring, buffer, policies, 16), genesis, troubles)

    async def send(self, verified: VerifiedGroup, name: str = "verifier-1") -> None:
        """A verifier publishes; another name is another message."""
        frame = encode(verified, an_identity("verifier-1"))
        await self.ground.bus(name).publish(Queue.VERIFIED, frame, f"{name}:{verified.group_id}")

    @property
    def depth(self) -> QueueDepth:
        return self.ground.run.queues[Queue.VERIFIED].depth()

    async def settle(self, seconds: float = 0.5) -> None:
        await self.ground.clock.sleep(seconds)


def a_verified(**task: Any) -> VerifiedGroup:
    return a_verified_group(a_group(a_task(**task)))


@in_virtual_time
async def test_a_group_is_held_unacknowledged(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.send(a_verified())
    async with running(scene.collector):
        await scene.collector.arrived.wait()
        assert (len(scene.buffer), scene.depth) == (1, QueueDepth(0, 1))


@in_virtual_time
async def test_what_is_in_hand_is_kept_alive_however_long_a_step_takes(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.send(a_verified())
    async with running(scene.collector):
        await scene.collector.arrived.wait()
        assert scene.buffer.take(1, GENESIS, 0.0)
        await scene.settle(20 * ACK_WAIT_S)
        (message,) = scene.ground.run.queues[Queue.VERIFIED]._taken.values()
        assert message.deliveries == 1


@in_virtual_time
async def test_a_second_copy_is_not_trained_and_not_acknowledged_before_the_commit(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.send(a_verified())
    await scene.send(a_verified(), name="verifier-2")
    async with running(scene.collector):
        await scene.settle()
        assert (len(scene.buffer), scene.collector.duplicates) == (1, 1)
        assert scene.depth == QueueDepth(0, 2)
        await scene.buffer.leases["learner-1.0"].settle(scene.ground.ring(bus=scene.bus))
        assert scene.depth == QueueDepth(0, 0)


@in_virtual_time
async def test_a_message_redelivered_while_it_is_in_hand_survives_a_crash_before_the_commit(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.send(a_verified())
    async with running(scene.collector):
        await scene.collector.arrived.wait()
        scene.ground.run.queues[Queue.VERIFIED].postpone(1, 0.0)  # its ack_wait is over
        await scene.settle()
        assert scene.collector.duplicates == 1
    assert scene.depth.total == 1, "acknowledged before anything was committed"


@in_virtual_time
async def test_a_redelivered_group_that_was_committed_is_acknowledged_without_training(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.bus.put(Bucket.POLICY, done_key("learner-1.0"), b"trained")
    await scene.send(a_verified())
    async with running(scene.collector):
        await scene.settle()
        assert (len(scene.buffer), scene.collector.duplicates, scene.depth.total) == (0, 1, 0)


@in_virtual_time
async def test_a_copy_that_comes_after_the_commit_is_acknowledged_even_if_the_lease_is_still_known(
    tmp_path: Path,
):
    scene = await Scene.at(tmp_path)
    await scene.send(a_verified())
    async with running(scene.collector):
        await scene.collector.arrived.wait()
        await scene.bus.put(Bucket.POLICY, done_key("learner-1.0"), b"trained")
        await scene.buffer.leases["learner-1.0"].settle(scene.ground.ring(bus=scene.bus))
        await scene.send(a_verified(), name="verifier-2")
        await scene.settle()
        assert scene.depth.total == 0


@in_virtual_time
async def test_a_group_that_was_committed_is_never_buried_however_often_it_comes(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.send(a_verified())
    (message,) = scene.ground.run.queues[Queue.VERIFIED]._waiting
    message.deliveries = scene.ground.spec.sampling.deliveries_max
    await scene.bus.put(Bucket.POLICY, done_key("learner-1.0"), b"trained")
    async with running(scene.collector):
        await scene.settle()
    assert (scene.ground.dead, scene.depth.total) == ([], 0)


@in_virtual_time
async def test_a_group_that_came_too_often_is_buried(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.send(a_verified())
    (message,) = scene.ground.run.queues[Queue.VERIFIED]._waiting
    message.deliveries = scene.ground.spec.sampling.deliveries_max
    async with running(scene.collector):
        await scene.settle()
    assert [letter.reason for letter in scene.ground.dead] == [DeadReason.TOO_MANY_DELIVERIES]


@in_virtual_time
async def test_bytes_that_no_learner_can_read_are_buried(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.bus.publish(Queue.VERIFIED, b"noise", "noise")
    async with running(scene.collector):
        await scene.settle()
    assert [letter.reason for letter in scene.ground.dead] == [DeadReason.UNDECODABLE]
    assert scene.depth.total == 0


def misfits() -> dict[str, VerifiedGroup]:
    task = a_task()
    whole = a_verified_group(a_group(task))
    uneven = a_rollout(sampler_logprobs=[-1.0])
    infinite = a_rollout(sampler_logprobs=[-1.0, float("-inf"), -1.0])
    huge = whole.verdicts[0].model_copy(update={"reward": 1e300})
    return {
        "ids differ": whole.model_copy(update={"group_id": "learner-1.7"}),
        "verdicts of other rollouts": whole.model_copy(update={"verdicts": whole.verdicts[::-1]}),
        "a rollout without verdict": whole.model_copy(update={"verdicts": whole.verdicts[:1]}),
        "lengths differ": a_verified_group(a_group(task, rollouts=(uneven, a_rollout(index=1)))),
        "not finite": a_verified_group(a_group(task, rollouts=(infinite, a_rollout(index=1)))),
        "a reward that overflows": whole.model_copy(update={"verdicts": (huge, whole.verdicts[1])}),
        "a group of noise": whole.model_copy(update={"group": whole.group[:50]}),
    }


@pytest.mark.parametrize("fault", list(misfits()))
@in_virtual_time
async def test_a_group_that_could_stop_a_step_is_buried_whatever_its_verifier_says(
    tmp_path: Path, fault: str
):
    scene = await Scene.at(tmp_path)
    await scene.send(misfits()[fault])
    async with running(scene.collector):
        await scene.settle()
    assert [letter.reason for letter in scene.ground.dead] == [DeadReason.BAD_STRUCTURE]
    assert (len(scene.buffer), scene.depth.total) == (0, 0)


@in_virtual_time
async def test_a_store_that_is_away_costs_time_but_no_group(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.ground.commit_update(scene.genesis, 1)
    scene.troubles += [StoreFault.UNAVAILABLE] * 8
    await scene.send(a_verified(clock=a_clock(**{"learner-1": 1})))
    async with running(scene.collector):
        await scene.settle(60.0)
        (message,) = scene.ground.run.queues[Queue.VERIFIED]._taken.values()
        assert message.deliveries == 1, "a group is kept alive while its clock is looked up"
    assert (len(scene.buffer), scene.ground.dead) == (1, [])


@in_virtual_time
async def test_a_clock_that_nobody_ever_published_is_buried(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.ground.commit_update(scene.genesis, 1)
    await scene.send(a_verified(clock=a_clock(**{"learner-1": 2})))
    async with running(scene.collector):
        await scene.settle()
    assert [letter.reason for letter in scene.ground.dead] == [DeadReason.BAD_STRUCTURE]


@in_virtual_time
async def test_a_clock_so_old_that_the_store_forgot_it_is_stale(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    for count in (1, 2):
        await scene.ground.commit_update(scene.genesis, count)
    await scene.ground.store().delete("test/updates/learner-1/1-test")
    await scene.send(a_verified(clock=a_clock(**{"learner-1": 1})))
    async with running(scene.collector):
        await scene.settle()
    assert scene.ground.dead == []
    assert not scene.buffer.ready(1, a_clock(**{"learner-1": 2}), 2.0)
    assert [drop.reason for drop in scene.buffer.take_dropped(9)] == [DropReason.STALE]


@in_virtual_time
async def test_a_group_of_a_quarantined_key_is_not_trained_on_whatever_its_verifier_says(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    liar = an_identity("sampler-1").public_key
    refuse = {liar: "sampler-1 was quarantined by verifier-1: it copies"}
    policies = scene.collector._policies
    collector = Collector(scene.collector._ring, scene.buffer, policies, 16, refuse.get)
    await scene.send(a_verified_group())
    async with running(collector):
        await scene.ground.clock.sleep(1.0)
    (letter,) = scene.ground.dead
    assert (letter.reason, letter.detail) == (DeadReason.QUARANTINED, refuse[liar])
    assert (len(scene.buffer.leases), scene.depth.total) == (0, 0)
