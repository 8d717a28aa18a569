"""The issuer: a seeded order that survives restarts, and a bound that is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS, VectorClock
from protocol.codec import decode_as, encode
from protocol.errors import OperatorError
from protocol.messages import DeadLetter, Head, Task
from protocol.ports import Write
from protocol.reasons import DeadReason
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue, cursor_key, done_key
from roles.learner.committer import nothing_committed
from roles.learner.issuer import SWEEP_S, Issuer, TaskStream
from roles.learner.outstanding import Cursor
from roles.tasks.prompts import Prompt
from tests.build import a_clock, a_runspec, an_identity
from tests.ground import FaultyBus, Ground, running

ROWS = 7
PROMPTS = [Prompt(row * 10, np.array([1, row], np.int32)) for row in range(ROWS)]


def a_run(**changes: object) -> RunSpec:
    fields: dict[str, object] = {"learner": {"groups_per_update": 2}, "staleness": {"max_staleness": 2}}
    return a_runspec(**(fields | changes))


def a_stream(seed: int = 0, learner: str = "learner-1") -> TaskStream:
    return TaskStream(a_run(seed=seed), learner, PROMPTS)


def an_issuer(ground: Ground, bus: FaultyBus, learners: int = 1, clock: VectorClock = GENESIS) -> Issuer:
    stream = TaskStream(ground.spec, "learner-1", PROMPTS)
    return Issuer(ground.ring(bus=bus), stream, lambda: clock, lambda: learners, alone)


async def alone() -> None:
    """Nobody else has this learner's name."""


def a_head(**fields: object) -> Head:
    return nothing_committed("test", "learner-1").model_copy(update=fields)


def numbers_in(ground: Ground) -> list[int]:
    return [int(task.group_id.rpartition(".")[2]) for task in tasks_in(ground)]


def settle(ground: Ground, *numbers: int) -> None:
    """A peer consumed these."""
    keys = ground.run.buckets[Bucket.POLICY]
    keys.write([Write(done_key(f"learner-1.{number}"), b"trained learner-2:1") for number in numbers])


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
    assert issuer.outstanding.cursor == 6


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
    await successor.resume(a_head())
    assert successor.outstanding.cursor == 6
    await successor._fill()
    stream = TaskStream(ground.spec, "learner-1", PROMPTS)
    assert tasks_in(ground)[0] == stream.task(6, GENESIS)


@in_virtual_time
async def test_a_cursor_that_the_broker_lost_is_taken_from_the_head(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    issuer = an_issuer(ground, ground.bus())
    await issuer.resume(a_head(cursor=4))
    assert issuer.outstanding.cursor == 4


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
    await issuer.resume(a_head())
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


def lose_the_queues(ground: Ground, cursor: Cursor | None) -> None:
    """The broker lost its disk; ``recover`` wrote ``cursor``."""
    ground.run.queues[Queue.TASK]._waiting.clear()
    ground.run.queues[Queue.TASK].forget_ids()
    keys = ground.run.buckets[Bucket.RUN]
    keys.delete(cursor_key("learner-1"))
    if cursor is not None:
        keys.write([Write(cursor_key("learner-1"), str(cursor).encode())])


@pytest.mark.parametrize("restored", [Cursor(1, 1), None])
@in_virtual_time
async def test_a_living_learner_issues_again_what_a_broker_lost_and_nobody_consumed(
    tmp_path: Path, restored: Cursor | None
):
    ground = Ground(tmp_path, a_run())
    issuer = an_issuer(ground, ground.bus())
    await issuer._fill()
    issuer.settled(["learner-1.0"])
    settle(ground, 2)
    lose_the_queues(ground, restored)
    async with running(issuer):
        await ground.clock.sleep(3.0)
    assert sorted(numbers_in(ground)) == [1, 3, 4, 5, *range(6, 12)], "the queue was empty: six more"
    entry = ground.run.buckets[Bucket.RUN].get(cursor_key("learner-1"))
    assert entry is not None
    assert entry.value == b"12"
    assert [event["tasks"] for event in ground.told("tasks_issued_again")] == [4 + 6]


@in_virtual_time
async def test_a_learner_that_starts_after_a_restoration_issues_again_and_goes_on_behind_its_last_task(
    tmp_path: Path,
):
    ground = Ground(tmp_path, a_run())
    settle(ground, 3, 5)
    lose_the_queues(ground, Cursor(3, 2))
    issuer = an_issuer(ground, ground.bus())
    await issuer.resume(a_head(floor=3, cursor=7))
    await issuer._fill()
    assert numbers_in(ground) == [4, 6, 7, 8, 9, 10]
    assert (issuer.outstanding.floor, issuer.outstanding.cursor) == (4, 11)


@in_virtual_time
async def test_a_crash_while_issuing_again_loses_nothing(tmp_path: Path):
    """The restored cursor stays until everything was issued."""
    ground = Ground(tmp_path, a_run())
    lose_the_queues(ground, Cursor(0, 0))
    bus = ground.bus()
    crashed = an_issuer(ground, bus)
    await crashed.resume(a_head(cursor=4))
    await crashed._issue(range(2))
    successor = an_issuer(ground, ground.bus())
    await successor.resume(a_head(cursor=4))
    await successor._fill()
    assert sorted(set(numbers_in(ground))) == list(range(6))


@in_virtual_time
async def test_what_peers_consumed_or_buried_moves_the_floor(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    issuer = an_issuer(ground, ground.bus())
    async with running(issuer):
        await ground.clock.sleep(1.0)
        settle(ground, 0, 1, 3)
        letter = DeadLetter(
            run="test", queue="task", reason=DeadReason.BAD_STRUCTURE, node="n", group_id="learner-1.2"
        )
        await ground.bus().bury(encode(letter, an_identity("n")))
        await ground.bus().bury(b"no letter")
        await ground.clock.sleep(3 * SWEEP_S)
    assert issuer.outstanding.floor == 4
