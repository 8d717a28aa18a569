"""The caretaker: what follows a commit, in time and one thing at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from node.virtual_time import in_virtual_time
from protocol.messages import Head
from protocol.runspec import RunSpec
from protocol.subjects import Queue
from roles.learner.caretaker import Caretaker, Committed
from roles.learner.evaluation import Evaluator
from roles.learner.fake_policy import FakePolicy
from roles.tasks.prompts import Prompt
from tests.build import a_clock, a_runspec
from tests.ground import Ground, running

PROMPTS = [Prompt(0, np.array([1, 2], np.int32))]


def a_run(problems: int = 1) -> RunSpec:
    return a_runspec(learner={"state_every": 2, "export_every": 3}, eval={"every": 4, "problems": problems})


def a_caretaker(ground: Ground, *, leads: bool = True) -> tuple[Caretaker, Evaluator]:
    evaluator = Evaluator(ground.ring(), PROMPTS)
    return Caretaker(
        ground.ring(), ground.store(), ground.offload, evaluator, lambda: leads, lambda *_: None
    ), evaluator


def committed(count: int) -> Committed:
    head = Head(
        run="test",
        learner="learner-1",
        count=count,
        clock=a_clock(**{"learner-1": count}),
        weight=count,
        path="",
        policy_digest="d",
        nonce="n",
    )
    return Committed(head, float(count), FakePolicy().state().result, FakePolicy().genesis(0))


async def told(ground: Ground, caretaker: Caretaker, *counts: int) -> None:
    """Commit after commit, each looked after before the next comes."""
    for count in counts:
        caretaker.committed(committed(count))
        await ground.clock.sleep(1.0)


def states(ground: Ground) -> list[str]:
    return [path.rpartition("/")[2] for path in sorted(ground.bucket.entries) if "/state/" in path]


def evaluations(ground: Ground) -> list[str]:
    return [m.data.decode("latin1") for m in ground.run.queues[Queue.EVAL_TASK]._waiting]


@in_virtual_time
async def test_state_and_export_are_kept_every_so_many_updates(tmp_path: Path):
    ground = Ground(tmp_path, a_run(problems=0))
    caretaker, _ = a_caretaker(ground)
    async with running(caretaker):
        await told(ground, caretaker, 1, 2, 3, 4, 5)
    assert states(ground) == ["2", "4"]
    assert [event["clock"] for event in ground.told("adapter_exported")] == ["learner-1:3"]


@in_virtual_time
async def test_only_the_newest_of_several_commits_is_looked_after(tmp_path: Path):
    ground = Ground(tmp_path, a_run(problems=0))
    caretaker, _ = a_caretaker(ground)
    async with running(caretaker):
        for count in (2, 3, 4):
            caretaker.committed(committed(count))
        await ground.clock.sleep(1.0)
    assert states(ground) == ["4"]


@in_virtual_time
async def test_evaluations_come_every_so_many_updates_but_never_two_at_once(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    caretaker, _ = a_caretaker(ground)
    async with running(caretaker):
        await told(ground, caretaker, 3, 4, 8)
        assert len(evaluations(ground)) == 1
        assert caretaker._evaluation is not None
        assert caretaker._evaluation.version == 4.0
        caretaker._evaluation.done.set()
        await told(ground, caretaker, 9)
        assert len(evaluations(ground)) == 2


@in_virtual_time
async def test_a_learner_that_does_not_lead_evaluates_nothing(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    caretaker, _ = a_caretaker(ground, leads=False)
    async with running(caretaker):
        await told(ground, caretaker, 4, 8)
    assert evaluations(ground) == []


@in_virtual_time
async def test_a_drained_learner_saves_its_state_and_nothing_else(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    caretaker, _ = a_caretaker(ground)
    async with running(caretaker):
        await told(ground, caretaker, 1)
        await caretaker.finish(asyncio.Event(), finished=False)
    assert (states(ground), ground.told("adapter_exported"), evaluations(ground)) == (["1"], [], [])


@in_virtual_time
async def test_the_end_of_a_run_is_saved_exported_and_evaluated_once(tmp_path: Path):
    """Even when the last commit is looked after at the same moment."""
    ground = Ground(tmp_path, a_run())
    caretaker, evaluator = a_caretaker(ground)
    async with running(caretaker, evaluator):
        caretaker.committed(committed(12))
        ending = asyncio.ensure_future(caretaker.finish(asyncio.Event(), finished=True))
        await ground.clock.sleep(1.0)
        assert len(evaluations(ground)) == 1
        ground.run.queues[Queue.EVAL_TASK].take()
        ground.run.queues[Queue.EVAL_TASK].remove(1)
        await ending
    assert (states(ground), len(ground.told("evaluated"))) == (["12"], 1)
    assert {event["clock"] for event in ground.told("adapter_exported")} == {"learner-1:12"}


@in_virtual_time
async def test_a_second_stop_does_not_wait_for_the_last_evaluation(tmp_path: Path):
    ground, stop = Ground(tmp_path, a_run()), asyncio.Event()
    caretaker, evaluator = a_caretaker(ground)
    async with running(evaluator):
        caretaker.committed(committed(12))
        ending = asyncio.ensure_future(caretaker.finish(stop, finished=True))
        await ground.clock.sleep(60.0)
        assert not ending.done()
        stop.set()
        await ending


@in_virtual_time
async def test_a_state_that_could_not_be_saved_is_tried_again_with_the_next_update(tmp_path: Path):
    ground = Ground(tmp_path, a_run(problems=0))
    caretaker, _ = a_caretaker(ground)
    blocker = {"test/state/learner-1/2/nested": {"manifest.json": b""}}
    ground.bucket.entries.update(blocker)  # entries do not nest: publishing is refused
    async with running(caretaker):
        await told(ground, caretaker, 2, 3)
    assert "3" in states(ground)
    assert len(ground.told("state_unsaved")) == 1


@in_virtual_time
async def test_a_resumed_learner_saves_soon_but_exports_and_evaluates_when_it_is_time(tmp_path: Path):
    ground = Ground(tmp_path, a_run())
    caretaker, _ = a_caretaker(ground)
    caretaker.start_at(9)
    async with running(caretaker):
        await told(ground, caretaker, 10)
        assert (states(ground), ground.told("adapter_exported"), evaluations(ground)) == (["10"], [], [])
        await told(ground, caretaker, 12)
        assert (len(ground.told("adapter_exported")), len(evaluations(ground))) == (1, 1)
