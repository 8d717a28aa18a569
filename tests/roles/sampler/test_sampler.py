"""The sampler: each group under one policy, nothing pauses, and what cannot be done is handed back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.virtual_time import in_virtual_time
from protocol.codec import decode_as
from protocol.errors import MessageTooLarge
from protocol.messages import Task
from protocol.ports import QueueDepth
from protocol.reasons import DeadReason
from protocol.subjects import Queue
from roles.policy.compose import Factors
from tests.build import a_clock
from tests.ground import Ground
from tests.roles.sampler.scene import LONG, LateLoads, ListingEngine, Scene, a_run

AT_1, AT_2 = a_clock(**{"learner-1": 1}), a_clock(**{"learner-1": 2})


@in_virtual_time
async def test_a_group_carries_the_task_as_it_was_signed_and_the_clock_it_was_sampled_under(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.commit(1)
    await scene.pass_time()
    await scene.task()
    await scene.pass_time(5.0)
    group = scene.groups()["learner-1.0"]
    assert decode_as(group.task.tobytes(), Task).group_id == "learner-1.0"
    assert (group.sampler, group.clock, len(group.rollouts), group.generation_s) == (
        "sampler-1",
        AT_1,
        2,
        2.0,
    )
    assert scene.tasks.total == 0
    await scene.drain()


@in_virtual_time
async def test_a_newer_policy_is_loaded_beside_a_group_that_keeps_its_own(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.task(0, tokens=LONG)
    await scene.pass_time()
    await scene.commit(1)
    await scene.pass_time()
    assert scene.sampler.clock == AT_1, "loading did not wait for the group"
    await scene.task(1)
    await scene.pass_time(LONG + 1)
    clocks = {group_id: group.clock.text for group_id, group in scene.groups().items()}
    assert clocks == {"learner-1.0": "genesis", "learner-1.1": "learner-1:1"}
    await scene.drain()


@in_virtual_time
async def test_a_pinned_task_is_sampled_under_exactly_its_clock(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    for count in (1, 2, 3):
        await scene.commit(count)
    await scene.pass_time()
    changes: dict[str, Any] = {"group_id": "eval-x.0", "clock": AT_2, "pinned": True, "split": "held_out"}
    await scene.task(queue=Queue.EVAL_TASK, **changes)
    await scene.pass_time(5.0)
    group = scene.groups(Queue.EVAL_ROLLOUT)["eval-x.0"]
    assert group.clock == AT_2
    assert scene.sampler.clock.text == "learner-1:3"
    await scene.drain()


@in_virtual_time
async def test_policies_are_unloaded_after_their_last_use_but_the_newest_and_pinned_ones_stay(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.commit(1)
    await scene.pass_time()
    newest = set(scene.engine.resident)
    assert len(newest) == 1, "genesis is gone"
    pinned: dict[str, Any] = {"clock": AT_1, "pinned": True}
    await scene.task(0, tokens=LONG, **pinned)
    await scene.task(1, tokens=2, **pinned)
    await scene.pass_time()
    await scene.commit(2)
    await scene.pass_time(5.0)
    assert newest < scene.engine.resident, "one pinned task is done, the other is not"
    assert len(scene.engine.resident) == 2
    await scene.pass_time(LONG)
    assert len(scene.engine.resident) == 1
    assert newest.isdisjoint(scene.engine.resident)
    await scene.drain()


class SlowLoads(ListingEngine):
    """Loading the newest policy takes a second after it is in place."""

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        await super().load_policy(name, factors, newest=newest)
        if newest:
            await self._clock.sleep(1.0)


@in_virtual_time
async def test_a_pinned_task_that_ends_while_its_policy_becomes_the_newest_does_not_unload_it(tmp_path: Path):
    scene = await Scene.at(tmp_path, engine_type=SlowLoads)
    await scene.pass_time(1.0)
    await scene.commit(1)
    await scene.task(0, tokens=1, clock=AT_1, pinned=True)
    await scene.pass_time(0.5)
    assert scene.sampler.clock.text == "genesis", "the load is still going on"
    await scene.pass_time(3.0)
    await scene.task(1)
    await scene.pass_time(5.0)
    assert {g.clock.text for g in scene.groups().values()} == {"learner-1:1"}
    assert len(scene.groups()) == 2
    await scene.drain()


@in_virtual_time
async def test_a_hopelessly_old_sampler_fetches_before_it_samples(tmp_path: Path):
    scene = await Scene.at(tmp_path, a_run(staleness={"max_staleness": 1}), engine_type=LateLoads)
    scene.ground.run.announcements.clear()
    for count in (1, 2):
        await scene.commit(count)
    await scene.task(0, clock=AT_2)
    await scene.pass_time(5.0)
    assert scene.groups()["learner-1.0"].clock == AT_2
    (awaited,) = scene.ground.told("policy_awaited")
    assert awaited["seconds"] == pytest.approx(1.0)
    await scene.drain()


@in_virtual_time
async def test_a_sampler_within_the_bound_does_not_wait(tmp_path: Path):
    scene = await Scene.at(tmp_path, a_run(staleness={"max_staleness": 1}))
    scene.ground.run.announcements.clear()
    await scene.commit(1)
    await scene.task(0, clock=AT_1)
    await scene.pass_time(5.0)
    assert scene.groups()["learner-1.0"].clock.text == "genesis"
    await scene.drain()


@in_virtual_time
async def test_a_policy_that_cannot_be_had_in_time_sends_the_task_back(tmp_path: Path):
    scene = await Scene.at(tmp_path, a_run(staleness={"max_staleness": 0}))
    await scene.ground.commit_update(scene.genesis, 1, data=b"noise")
    await scene.task(0, clock=AT_1, deadline_s=10.0)
    await scene.pass_time(10.5)
    (message,) = scene.ground.run.queues[Queue.TASK]._taken.values()
    assert scene.sampler.busy == 0
    assert message.deliveries == 1
    await scene.drain()


@in_virtual_time
async def test_a_group_past_its_deadline_goes_on_with_what_is_finished(tmp_path: Path):
    scene = await Scene.at(tmp_path, eos_ids=(2, 3, 4, 5))
    await scene.task(0, tokens=LONG, group_size=16, deadline_s=3.0)
    await scene.pass_time(5.0)
    group = scene.groups()["learner-1.0"]
    assert 2 <= len(group.rollouts) < 16
    assert all(len(rollout.token_ids) <= 3 for rollout in group.rollouts)
    await scene.drain()


@in_virtual_time
async def test_fewer_than_two_finished_rollouts_go_back_to_the_queue(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.task(0, tokens=LONG, deadline_s=3.0)
    await scene.pass_time(3.5)
    assert (scene.groups(), scene.tasks, scene.sampler.busy) == ({}, QueueDepth(0, 1), 0)
    await scene.pass_time(2.0)
    assert scene.sampler.busy == 1, "it comes again after a moment"
    await scene.drain()


@in_virtual_time
async def test_what_the_engine_cannot_sample_goes_back_and_is_buried_when_nobody_can(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.task(0, prompt_token_ids=[1, 99])
    await scene.task(1)
    await scene.pass_time(20.0)
    assert list(scene.groups()) == ["learner-1.1"]
    assert [letter.reason for letter in scene.ground.dead] == [DeadReason.TOO_MANY_DELIVERIES]
    assert scene.tasks.total == 0
    await scene.drain()


@in_virtual_time
async def test_a_group_that_is_too_large_to_send_is_buried_and_the_sampler_goes_on(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    publish = scene.bus.publish

    async def small_only(queue: Queue, data: bytes, message_id: str) -> None:
        if message_id.endswith(".0"):
            raise MessageTooLarge("a message of 99 MB")
        await publish(queue, data, message_id)

    scene.bus.publish = small_only  # type: ignore[method-assign]
    await scene.task(0)
    await scene.task(1)
    await scene.pass_time(5.0)
    assert [(letter.reason, letter.group_id) for letter in scene.ground.dead] == [
        (DeadReason.BAD_STRUCTURE, "learner-1.0")
    ]
    assert (list(scene.groups()), scene.tasks.total) == (["learner-1.1"], 0)
    await scene.drain()


@in_virtual_time
async def test_signs_of_life_keep_a_long_group_from_being_sampled_twice(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    other = Scene(scene.ground, scene.genesis)
    await scene.task(0, tokens=LONG)
    await scene.pass_time(LONG + 2)
    assert len(scene.ground.run.queues[Queue.ROLLOUT]._waiting) == 1
    assert scene.engine.calls["sample"] + other.engine.calls["sample"] == 1
    await scene.drain()
    await other.drain()


@in_virtual_time
async def test_a_drain_finishes_what_it_can_and_hands_the_rest_back(tmp_path: Path):
    scene = await Scene.at(tmp_path, drain_s=5.0)
    await scene.task(0, tokens=3)
    await scene.task(1, tokens=LONG)
    await scene.pass_time()
    began = scene.ground.clock.monotonic()
    await scene.drain()
    assert scene.ground.clock.monotonic() - began < 6.0
    assert list(scene.groups()) == ["learner-1.0"]
    (message,) = scene.ground.run.queues[Queue.TASK]._taken.values()
    assert message.due is not None
    assert message.due <= scene.ground.clock.monotonic()


@in_virtual_time
async def test_a_drain_hands_back_a_group_of_which_only_the_short_rollouts_are_finished(tmp_path: Path):
    scene = await Scene.at(tmp_path, eos_ids=(2, 3, 4, 5), drain_s=5.0)
    await scene.task(0, tokens=LONG, group_size=16)
    await scene.pass_time()
    await scene.drain()
    assert scene.groups() == {}
    assert scene.tasks.total == 1


@in_virtual_time
async def test_a_group_whose_policy_became_too_old_goes_back_and_begins_anew(tmp_path: Path):
    scene = await Scene.at(tmp_path, a_run(staleness={"max_staleness": 1}))
    await scene.task(0, tokens=LONG)
    await scene.pass_time()
    await scene.commit(1)
    await scene.pass_time()
    assert scene.sampler.busy == 1, "one version behind is of use"
    await scene.commit(2)
    await scene.pass_time()
    assert scene.sampler.busy == 0
    await scene.pass_time(LONG + 3)
    assert scene.groups()["learner-1.0"].clock == AT_2
    assert scene.engine.calls["sample"] == 2
    await scene.drain()


@in_virtual_time
async def test_a_pinned_group_is_never_too_old(tmp_path: Path):
    scene = await Scene.at(tmp_path, a_run(staleness={"max_staleness": 1}))
    await scene.commit(1)
    await scene.pass_time()
    await scene.task(0, tokens=LONG, clock=AT_1, pinned=True)
    await scene.pass_time()
    for count in (2, 3, 4):
        await scene.commit(count)
        await scene.pass_time()
    await scene.pass_time(LONG + 1)
    assert scene.groups()["learner-1.0"].clock == AT_1
    assert scene.engine.calls["sample"] == 1
    await scene.drain()


@in_virtual_time
async def test_a_broker_that_is_away_when_a_group_is_ready_gets_it_later(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    await scene.task(0)
    await scene.pass_time()
    scene.bus.away = True
    await scene.pass_time(2.5)
    scene.bus.away = False
    await scene.pass_time(6.0)
    assert list(scene.groups()) == ["learner-1.0"]
    await scene.drain()


@in_virtual_time
async def test_a_stop_before_there_is_a_genesis_ends_the_sampler(tmp_path: Path):
    ground = Ground(tmp_path)
    scene = Scene(ground, {})
    await scene.pass_time(5.0)
    await scene.drain()
