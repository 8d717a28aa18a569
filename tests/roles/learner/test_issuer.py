"""The issuer: a seeded order that survives restarts, and a bound that is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS, VectorClock
from protocol.codec import decode_as
from protocol.errors import OperatorError
from protocol.messages import Task
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue, cursor_key
from roles.learner.issuer import Issuer, TaskStream
from roles.tasks.prompts import Prompt
from tests.build import a_clock, a_runspec
from tests.ground import FaultyBus, Ground, running

ROWS = 7
PROMPTS = [Prompt(row * 10, np.array([1, row], np.int32)) for row in range(ROWS)]


def a_run(**changes: object) -> RunSpec:
    fields: dict[str, object] = {"learner": {"groups_per_update": 2}, "staleness": {"max_staleness": 2}}
    return a_runspec(**(fields | changes))


def a_stream(seed: int = 0, learner: str = "learner-1") -> TaskStream:
    return TaskStream(a_run(seed=seed), learner, PROMPTS)


def an_issuer(ground: Ground, bus: FaultyBus, learners: int = 1, clock: VectorClock = GENESIS) -> Issuer:
    return Issuer(
        ground.ring(bus=bus), TaskStream(ground.spec, "learner-1", PROMPTS), lambda: clock, lambda: learners
    )


def tasks_in(ground: Ground) -> list[Task]:
    return [decode_as(message.data, Task) for message in ground.run.queues[Queue.TASK]._waiting]


def test_every_row_comes_once_per_epoch_in_a_fresh_order():
    stream = a_stream()
    epochs = [[stream.task(e * ROWS + i, GENESIS).row for i in range(ROWS)] for e in range(3)]
    assert all(sorted(rows) == [row * 10 for row in range(ROWS)] for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_same_seed_gives_the_same_tasks_in_whatever_order_they_are_asked_for():
    forwards, backwards = a_stream(), a_stream()
    first = [forwards.task(number, GENESIS) for number in range(20)]
    assert [backwards.task(number, GENESIS) for number in reversed(range(20))] == first[::-1]


def test_seeds_and_learners_have_their_own_order_and_no_two_tasks_share_a_seed():
    streams = [a_stream(), a_stream(seed=1), a_stream(learner="learner-2")]
    rows = {tuple(stream.task(i, GENESIS).row for i in range(ROWS)) for stream in streams}
    seeds = {stream.task(i, GENESIS).seed for stream in streams for i in range(50)}
    assert (len(rows), len(seeds)) == (3, 150)


def test_a_task_says_what_the_run_says():
    task = a_stream().task(3, a_clock(**{"learner-1": 2}))
    sampling = a_run().sampling
    assert (task.group_id, task.clock.text, task.pinned) == ("learner-1.3", "learner-1:2", False)
    assert (task.group_size, task.deadline_s) == (sampling.group_size, sampling.deadline_s)
    assert task.params.max_new_tokens == sampling.max_new_tokens


def test_a_run_without_rows_is_the_operators_mistake():
    with pytest.raises(OperatorError, match=r"no row to train on.*held_out"):
        TaskStream(a_run(), "learner-1", [])


@in_virtual_time
async def test_the_bound_is_filled_and_never_exceeded(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    issuer = an_issuer(ground, ground.bus())
    for _ in range(3):
        await issuer._fill()
        assert [task.group_id for task in tasks_in(ground)] == [f"learner-1.{i}" for i in range(6)]
    ground.run.queues[Queue.TASK].take()
    await issuer._fill()
    assert issuer.in_flight == 6, "delivered and unacknowledged is still in flight"
    await ground.bus().publish(Queue.VERIFIED, b"a group on its way", "other")
    ground.run.queues[Queue.TASK].remove(1)
    await issuer._fill()
    assert issuer.cursor == 6


@in_virtual_time
async def test_a_consumed_group_makes_room_for_one_more(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    issuer = an_issuer(ground, ground.bus())
    await issuer._fill()
    ground.run.queues[Queue.TASK].take()
    ground.run.queues[Queue.TASK].remove(1)
    await issuer._fill()
    assert [task.group_id for task in tasks_in(ground)][-1] == "learner-1.6"


@in_virtual_time
async def test_a_restarted_learner_goes_on_at_the_next_task_not_at_the_first(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    await an_issuer(ground, ground.bus())._fill()
    ground.run.queues[Queue.TASK]._waiting.clear()
    successor = an_issuer(ground, ground.bus())
    await successor.resume(0)
    assert successor.cursor == 6
    await successor._fill()
    stream = TaskStream(ground.spec, "learner-1", PROMPTS)
    assert tasks_in(ground)[0] == stream.task(6, GENESIS)


@in_virtual_time
async def test_a_cursor_that_the_broker_lost_is_taken_from_the_head(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    issuer = an_issuer(ground, ground.bus())
    await issuer.resume(4)
    assert issuer.cursor == 4


@in_virtual_time
async def test_a_crash_before_the_cursor_was_kept_resends_the_same_ids(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    await an_issuer(ground, ground.bus())._fill()
    await ground.bus().delete(Bucket.RUN, cursor_key("learner-1"))
    for _ in range(6):
        ground.run.queues[Queue.TASK].take()
    ground.run.queues[Queue.TASK]._taken.clear()
    ground.run.queues[Queue.TASK].forget_ids()
    issuer = an_issuer(ground, ground.bus())
    await issuer.resume(0)
    await issuer._fill()
    assert [task.group_id for task in tasks_in(ground)] == [f"learner-1.{i}" for i in range(6)]


@in_virtual_time
async def test_an_absent_broker_postpones_tasks_and_loses_none(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    bus = ground.bus()
    issuer = an_issuer(ground, bus)
    bus.away = True
    async with running(issuer):
        await ground.clock.sleep(3.0)
        assert tasks_in(ground) == []
        bus.away = False
        await ground.clock.sleep(1.0)
        assert len(tasks_in(ground)) == 6
