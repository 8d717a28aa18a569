"""Retention: every reason to keep an update, alone; and what no reason keeps goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protocol.clock import VectorClock
from roles.learner.retention import Needs, Stored, expendable
from tests.build import a_clock

NOBODY = Needs(named=(), learners=(), floors={"a": 1000})
NOW = 10_000.0


def some_updates(count: int, weight: float = 1.0, seen_at: float = 0.0) -> list[Stored]:
    """Updates 1 to ``count`` of learner ``a``; each trained task ``a.<its count>``."""
    return [Stored(f"{n}", n, n * weight, (f"a.{n}",), seen_at) for n in range(1, count + 1)]


def kept(
    own: Sequence[Stored], needs: Needs = NOBODY, *, keep: int = 2, max_staleness: float = 0
) -> list[int]:
    settings = {"keep": keep, "grace_s": 100.0, "max_staleness": max_staleness, "now": NOW}
    free = expendable(own, "a", needs, **settings)  # type: ignore[arg-type]
    return [stored.count for stored in own if stored not in free]


def test_without_another_reason_only_the_newest_stay():
    assert kept(some_updates(10)) == [9, 10]
    assert kept(some_updates(2)) == [1, 2]
    assert kept([]) == []


def test_what_is_young_stays():
    own = [*some_updates(6), Stored("7", 7, 7.0, (), NOW - 99), Stored("8", 8, 8.0, (), NOW - 1)]
    assert kept(own, keep=1) == [7, 8]


def test_what_a_live_peer_names_stays():
    named = (a_clock(a=3), a_clock(b=4), VectorClock.of({"a": 5, "b": 1}))
    assert kept(some_updates(10), Needs(named, (), {"a": 1000})) == [3, 5, 9, 10]


@pytest.mark.parametrize(("weight", "first"), [(1.0, 6), (0.5, 2), (2.0, 8)])
def test_what_a_group_may_still_be_trained_under_stays(weight: float, first: int):
    """Four versions back from the newest: more updates the less each weighs."""
    assert kept(some_updates(10, weight), keep=1, max_staleness=4) == list(range(first, 11))


def test_the_slowest_live_learner_counts():
    learners = (a_clock(a=10), a_clock(a=7, b=2))
    assert kept(some_updates(10), Needs((), learners, {"a": 1000}), max_staleness=2) == [5, 6, 7, 8, 9, 10]


def test_a_learner_that_has_merged_nothing_yet_keeps_everything():
    assert kept(some_updates(10), Needs((), (a_clock(b=1),), {"a": 1000})) == list(range(1, 11))


def test_what_lists_a_task_that_its_learner_has_not_settled_stays():
    """After a loss of the broker's disk only the manifest knows that the task was consumed."""
    assert kept(some_updates(10), Needs((), (), {"a": 6})) == [6, 7, 8, 9, 10]
    assert kept(some_updates(10), Needs((), (), {})) == list(range(1, 11)), "a learner without any head"
