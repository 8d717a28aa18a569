"""Admission: the bound and nothing beyond it."""

from __future__ import annotations

import pytest

from protocol.ports import QueueDepth
from roles.learner.admission import groups_in_flight, tasks_to_issue


def room(in_flight: int, **changes: int) -> int:
    settings = {"max_staleness": 4, "publish_every": 1, "groups_per_update": 16, "learners": 1}
    return tasks_to_issue(in_flight, **(settings | changes))


def test_everything_pending_and_unacknowledged_is_in_flight():
    depths = [QueueDepth(3, 4), QueueDepth(0, 2), QueueDepth(1, 0)]
    assert groups_in_flight(depths) == 10


@pytest.mark.parametrize(("in_flight", "expected"), [(0, 80), (79, 1), (80, 0), (200, 0)])
def test_tasks_are_issued_up_to_the_bound_and_never_beyond(in_flight: int, expected: int):
    assert room(in_flight) == expected


def test_a_synchronous_run_has_one_update_in_flight():
    assert room(0, max_staleness=0) == 16


def test_steps_that_share_an_update_are_all_admitted():
    assert room(0, max_staleness=0, publish_every=4) == 64


@pytest.mark.parametrize("learners", [1, 2, 3, 7])
@pytest.mark.parametrize("in_flight", [0, 1, 77, 79])
def test_learners_that_count_at_the_same_moment_share_the_room(learners: int, in_flight: int):
    share = room(in_flight, learners=learners)
    free = 80 * learners - in_flight
    assert free <= share * learners < free + learners


def test_a_learner_that_has_seen_nobody_counts_itself():
    assert room(0, learners=0) == 80
