"""Progress as read off telemetry, and the curve that a terminal shows."""

from __future__ import annotations

from typing import Any

import pytest

from node.progress import RECENT, Progress, curve
from protocol.messages import Event
from tests.build import RUN


def an_event(name: str, at: float = 1.0, **fields: Any) -> Event:
    return Event(run=RUN, node="learner-1", role="learner", name=name, at=at, fields=fields)


def progress_of(*events: Event) -> Progress:
    progress = Progress(8)
    for event in events:
        progress.take(event)
    return progress


def a_step(reward: float, version: float, at: float = 1.0, **fields: Any) -> Event:
    return an_event("step_trained", at, reward=reward, version=version, **fields)


def test_steps_add_up_and_the_newest_one_is_shown():
    first = {"sample/staleness_mean": 1.0, "sample/staleness_max": 3.0, "rollout/inflight": 7}
    second = {"sample/staleness_mean": 0.5, "sample/staleness_max": 2.0, "rollout/inflight": 5}
    times = {"perf/publish_blocked_s": 0.25, "perf/step_s": 1.0, "perf/rollout_wait_s": 0.5}
    found = progress_of(a_step(0.5, 1, 10.0, **first, **times), a_step(1.0, 2, 12.0, **second, **times))
    assert (found.rewards, found.version) == ([0.5, 1.0], 2)
    assert (found.staleness_mean, found.staleness_max, found.in_flight) == (0.5, 3.0, 5)
    assert (found.blocked_s, found.step_s, found.wait_s) == (0.5, 2.0, 1.0)
    assert (found.first_at, found.last_at) == (10.0, 12.0)


def test_the_largest_deviation_of_the_ratio_is_kept():
    steps = [a_step(0, i, ratio_max_dev_on_policy=d) for i, d in enumerate((1e-6, 1e-4, 1e-5))]
    assert progress_of(*steps).ratio_deviation_max == 1e-4


def test_other_events_are_counted_under_their_name():
    found = progress_of(
        an_event("update_committed", groups_trained=4, publish_s=0.5),
        an_event("update_committed", groups_trained=8, publish_s=0.25),
        an_event("group_sampled", tokens=20),
        an_event("group_sampled", tokens=22),
        an_event("update_rejected", reason="too_stale"),
        an_event("evaluated", version=4.0, reward=0.75),
        an_event("run_finished"),
    )
    assert (found.groups_trained, found.publish_s, found.tokens) == (8, [0.5, 0.25], 42)
    assert (found.rejected, found.evals, found.finished) == (["too_stale"], [(4.0, 0.75)], True)


def test_events_that_say_nothing_or_nonsense_do_no_harm():
    names = ("step_trained", "update_committed", "update_rejected", "group_sampled", "evaluated", "new")
    for name in names:
        progress_of(an_event(name))
        progress_of(an_event(name, reward="high", version=None, tokens="many", reason=3))
    assert progress_of(an_event("evaluated", reward=0.5)).evals == [(0.0, 0.5)]
    assert progress_of(an_event("evaluated", version=4.0, reward=None)).evals == []


def test_reward_is_the_mean_of_the_last_steps_and_zero_before_the_first():
    assert (Progress(8).reward, Progress(8).reward_first) == (0.0, 0.0)
    found = progress_of(*(a_step(float(i >= 3), i) for i in range(3 + RECENT)))
    assert (found.reward_first, found.reward) == (0.0, 1.0)


def test_the_line_says_where_the_run_stands():
    steps = progress_of(a_step(0.5, 3, **{"sample/staleness_max": 2.0, "rollout/inflight": 7}))
    assert steps.line(["learner-1", "sampler-1"]) == (
        "update 3/8  reward 0.50  staleness 0.0 (max 2)  in flight 7  alive: learner-1, sampler-1"
    )
    steps.take(an_event("evaluated", version=4.0, reward=0.754))
    assert "reward 0.50  held-out 0.75  staleness" in steps.line([])


def test_nothing_makes_no_curve():
    assert curve([]) == []


def test_one_value_is_one_column():
    assert curve([1.0], height=2) == ["1.00 █", "0.50 █"]
    assert curve([0.0], height=2) == ["1.00  ", "0.50  "]
    assert curve([0.75], height=2) == ["1.00 ▄", "0.50 █"]


def test_a_rising_curve_rises():
    assert curve([0.0, 0.25, 0.5, 0.75, 1.0], height=2) == ["1.00    ▄█", "0.50  ▄███"]


def test_more_values_than_columns_are_averaged():
    assert curve([0.0, 1.0, 1.0, 1.0], width=2, height=2) == ["1.00  █", "0.50 ██"]
    assert curve([0.5] * 1000, width=3, height=2) == ["1.00    ", "0.50 ███"]


@pytest.mark.parametrize("count", [1, 2, 59, 60, 61, 119, 1000])
def test_every_line_is_as_wide_as_the_curve(count: int):
    assert {len(line) for line in curve([0.3] * count)} == {5 + min(60, count)}
    assert len(curve([0.3] * count)) == 6


def test_values_outside_zero_to_one_are_drawn_at_the_edge():
    assert curve([-5.0, 1e308, 7.0, 0.5], height=2) == ["1.00  ██ ", "0.50  ███"]
