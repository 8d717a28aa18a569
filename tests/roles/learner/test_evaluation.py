"""Evaluation: pinned to one clock, complete, and over even when a group never comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from node.virtual_time import in_virtual_time
from protocol.clock import VectorClock
from protocol.codec import decode_as, encode
from protocol.messages import Task, VerifiedGroup
from protocol.ports import Delivery
from protocol.subjects import Queue
from roles.learner.evaluation import LOST_LOOK_S, Evaluator, eval_tasks
from roles.tasks.prompts import Prompt
from tests.build import a_clock, a_group, a_runspec, a_verified_group, an_identity
from tests.ground import Ground, running

SPEC = a_runspec(eval={"problems": 3, "completions_per_problem": 2})
PROMPTS = [Prompt(row, np.array([1, row], np.int32)) for row in range(5)]
CLOCK = a_clock(**{"learner-1": 4})


def an_evaluator(ground: Ground, node: str = "learner-1") -> Evaluator:
    return Evaluator(ground.ring(node), PROMPTS)


class Peers:
    """Plays samplers and verifiers: takes evaluation tasks and answers with rewards."""

    def __init__(self, ground: Ground) -> None:
        self._bus = ground.bus("verifier-1")

    async def take(self, count: int) -> list[tuple[Task, Delivery]]:
        consumer = await self._bus.consume(Queue.EVAL_TASK, 16)
        deliveries = [await consumer.next() for _ in range(count)]
        return [(decode_as(delivery.data, Task), delivery) for delivery in deliveries]

    async def answer(self, task: Task, delivery: Delivery, *rewards: float | None) -> None:
        verified = a_verified_group(a_group(task), rewards)
        frame = encode(verified, an_identity("verifier-1"))
        await self._bus.publish(Queue.EVAL_VERIFIED, frame, f"verified:{task.group_id}")
        await delivery.ack()


def test_tasks_are_pinned_to_their_clock_and_of_the_held_out_split():
    tasks = eval_tasks(SPEC, PROMPTS[:3], CLOCK)
    assert {(task.clock, task.pinned, task.split, task.group_size) for task in tasks} == {
        (CLOCK, True, "held_out", 2)
    }
    assert [task.row for task in tasks] == [0, 1, 2]


def test_the_same_problems_have_the_same_seeds_at_every_clock_and_other_ids():
    first, second = (eval_tasks(SPEC, PROMPTS, clock) for clock in (CLOCK, VectorClock()))
    assert [task.seed for task in first] == [task.seed for task in second]
    assert {task.group_id for task in first}.isdisjoint(task.group_id for task in second)


@in_virtual_time
async def test_an_evaluation_is_done_when_every_verdict_has_come(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    evaluator, peers = an_evaluator(ground), Peers(ground)
    async with running(evaluator):
        evaluation = await evaluator.start(CLOCK, 4.0)
        first, second, third = await peers.take(3)
        await peers.answer(*first, 1.0, 0.0)
        await peers.answer(*second, 1.0, None)
        await ground.clock.sleep(0.1)
        assert not evaluation.done.is_set()
        await peers.answer(*third, 0.0, 0.0)
        await evaluation.done.wait()
        await ground.clock.sleep(0.1)
    (told,) = ground.told("evaluated")
    assert (told["clock"], told["version"], told["completions"]) == ("learner-1:4", 4.0, 5)
    assert (told["reward"], told["unscorable"], told["lost"]) == (2 / 5, 1, 0)
    assert ground.run.queues[Queue.EVAL_VERIFIED].depth().total == 0


@in_virtual_time
async def test_a_group_that_left_the_ring_does_not_hold_an_evaluation_up_for_ever(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    evaluator, peers = an_evaluator(ground), Peers(ground)
    async with running(evaluator):
        evaluation = await evaluator.start(CLOCK, 4.0)
        first, second, third = await peers.take(3)
        await peers.answer(*first, 1.0, 1.0)
        await second[1].reject()
        await ground.clock.sleep(2 * LOST_LOOK_S)
        assert not evaluation.done.is_set(), "one group is still on its way"
        await peers.answer(*third, 0.0, 0.0)
        await third[1].reject()
        await evaluation.done.wait()
    assert (evaluation.lost, evaluation.reward) == (1, 0.5)


@in_virtual_time
async def test_who_evaluates_nothing_takes_no_verdict_away(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    evaluator, other, peers = an_evaluator(ground), an_evaluator(ground, "learner-2"), Peers(ground)
    async with running(evaluator, other):
        evaluation = await evaluator.start(CLOCK, 4.0)
        for task, delivery in await peers.take(3):
            await peers.answer(task, delivery, 1.0, 1.0)
        await evaluation.done.wait()
    assert (evaluation.lost, evaluation.reward) == (0, 1.0)


@in_virtual_time
async def test_a_second_evaluation_follows_the_first(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    evaluator, peers = an_evaluator(ground), Peers(ground)
    async with running(evaluator):
        for version in (4, 8):
            evaluation = await evaluator.start(a_clock(**{"learner-1": version}), float(version))
            for task, delivery in await peers.take(3):
                await peers.answer(task, delivery, 1.0, 0.0)
            await evaluation.done.wait()
    assert [event["version"] for event in ground.told("evaluated")] == [4.0, 8.0]


@in_virtual_time
async def test_a_verdict_that_nobody_waits_for_is_cleared_by_the_next_evaluation(tmp_path: Path):
    ground = Ground(tmp_path, SPEC)
    evaluator, peers = an_evaluator(ground), Peers(ground)
    stray: VerifiedGroup = a_verified_group()
    await ground.bus().publish(Queue.EVAL_VERIFIED, encode(stray, an_identity("verifier-1")), "stray")
    async with running(evaluator):
        evaluation = await evaluator.start(CLOCK, 4.0)
        for task, delivery in await peers.take(3):
            await peers.answer(task, delivery, 1.0, 0.0)
        await evaluation.done.wait()
        await ground.clock.sleep(0.1)
    assert ground.run.queues[Queue.EVAL_VERIFIED].depth().total == 0
