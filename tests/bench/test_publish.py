"""``bench.publish``: how phases are told apart, what counts as blocked, and one run of real processes."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from bench.publish import goals
from bench.publishing.timeline import PHASES, Timeline, Window
from protocol.messages import Event

WINDOW = Window(1, 1, ("sampler-1",))


def told(node: str, name: str, at: float, **fields: float | str | bool | None) -> Event:
    """What a node told."""
    role = node.partition("-")[0]
    return Event(run="bench", node=node, role=role, name=name, at=at, fields=fields)


def a_step(at: float, **changes: float) -> Event:
    """A step of ten seconds after five of waiting."""
    fields = {"perf/publish_s": 0.5, "perf/publish_blocked_s": 0.0, "perf/step_s": 10.0}
    return told(
        "learner-1",
        "step_trained",
        at,
        version=1.0,
        updated=True,
        **{"perf/rollout_wait_s": 5.0} | fields | changes,
    )


def a_way(heard_at: float = 110.0) -> list[Event]:
    """Version 1: the step ends at 100; its sampler loads it four seconds after it heard of it."""
    commit = {"upload_s": 3.0, "commit_s": 0.25, "publish_s": 4.0}
    load = {"waited_s": 1.0, "fetch_s": 2.0, "compose_s": 0.5, "load_s": 0.5}
    return [
        a_step(100.5),
        told("learner-1", "update_committed", 105.0, version=1.0, clock="learner-1:1", **commit),
        told("sampler-1", "policy_loaded", heard_at + 4.0, version=1.0, clock="learner-1:1", **load),
        told("sampler-1", "policy_sampled", 130.0, version=1.0, start_s=2.0, first_token_s=0.25),
    ]


def a_timeline(*events: Event) -> Timeline:
    timeline = Timeline()
    for event in events:
        timeline.take(event)
    return timeline


def test_a_version_is_followed_phase_by_phase():
    (way,) = a_timeline(*a_way()).ways(WINDOW)
    assert dict(zip(PHASES, way.seconds, strict=True)) == pytest.approx(
        {
            "snapshot": 0.5,
            "queue": 0.5,
            "upload": 3.0,
            "commit": 0.25,
            "announce": 5.75,
            "busy": 1.0,
            "fetch": 2.0,
            "compose": 0.5,
            "load": 0.5,
            "start": 2.0,
            "first_token": 0.25,
        }
    )
    assert (way.loaded_s, way.total_s) == (14.0, 16.25)


def test_a_sampler_may_hear_of_a_commit_before_its_learner_does_and_phases_still_add_up():
    (way,) = a_timeline(*a_way(heard_at=103.0)).ways(WINDOW)
    assert min(way.seconds) >= 0
    assert way.seconds[PHASES.index("announce")] == 0
    assert way.loaded_s == 7.0


def test_a_version_that_was_loaded_and_never_sampled_from_counts_up_to_there():
    (way,) = a_timeline(*a_way()[:-1]).ways(WINDOW)
    assert not way.sampled
    assert way.loaded_s == 14.0
    assert math.isnan(way.total_s)


def test_a_version_outside_the_window_and_a_sampler_that_came_later_do_not_count():
    timeline = a_timeline(*a_way())
    assert not list(timeline.ways(Window(2, 3, ("sampler-1",))))
    assert not list(timeline.ways(Window(1, 1, ("sampler-2",))))
    assert timeline.skipped(Window(1, 2, ("sampler-1", "sampler-2"))) == 3


def test_the_snapshot_and_the_wait_for_a_place_are_what_blocks_a_learner():
    timeline = a_timeline(a_step(100.0, **{"perf/publish_blocked_s": 1.0}))
    assert timeline.learner_blocked(WINDOW) == pytest.approx((1.5 / 16, 1.5 / 11))


def test_the_sampler_that_was_blocked_most_counts():
    groups = [
        told("sampler-1", "group_sampled", 103.0, tokens=4, generation_s=2.0, held_s=0.5),
        told("sampler-1", "group_sampled", 104.0, tokens=4, generation_s=2.0, held_s=0.0),
        told("sampler-2", "group_sampled", 104.0, tokens=4, generation_s=1.0, held_s=0.0),
        told("sampler-2", "group_sampled", 200.0, tokens=4, generation_s=1.0, held_s=1.0),
    ]
    timeline = a_timeline(*a_way(), *groups)
    assert timeline.sampler_blocked(Window(1, 1, ("sampler-2",))) == 0
    assert timeline.sampler_blocked(Window(1, 1, ("sampler-1", "sampler-2"))) == 0.5 / 4


def test_a_task_that_was_held_back_for_a_policy_blocks_a_sampler():
    timeline = a_timeline(*a_way(), told("sampler-1", "policy_awaited", 104.0, seconds=0.9))
    assert timeline.sampler_blocked(WINDOW) == pytest.approx(0.9 / 4.5)


def test_the_worst_cell_is_held_against_the_goals():
    shares = {"a/learner_blocked_fraction": 0.001, "b/learner_blocked_fraction": 0.02}
    shares |= {"a/sampler_blocked_fraction": 0.009, "b/sampler_blocked_fraction": 0.001}
    found = {goal.name: (goal.value, goal.met) for goal in goals(shares)}
    assert found == {
        "learner_blocked_fraction": (0.02, False),
        "sampler_blocked_fraction": (0.009, True),
    }


@pytest.mark.e2e
@pytest.mark.release
@pytest.mark.timeout(400)
def test_the_quick_bench_follows_versions_through_a_run_that_a_sampler_joins():
    command = [sys.executable, "-m", "bench.publish", "--quick", "--stores", "hub", "--ranks", "2"]
    command += ["--samplers", "1", "2", "--updates", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    figures = result["figures"]
    assert result["goals"] == []
    for cell in ("hub/rank2/samplers1", "hub/rank2/samplers2"):
        assert figures[f"{cell}/first_tokens"] >= 1
        assert 0 < figures[f"{cell}/step_to_loaded_s"] <= figures[f"{cell}/step_to_first_token_s"]
        assert all(figures[f"{cell}/{phase}_s"] >= 0 for phase in PHASES)
        assert figures[f"{cell}/upload_s"] > 0
        assert figures[f"{cell}/fetch_s"] > 0
    assert figures["peer/sync_s"] == 8.5
