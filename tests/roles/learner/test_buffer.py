"""The buffer: which groups a step gets, and which are dropped."""

from __future__ import annotations

import itertools

import pytest

from protocol.clock import GENESIS, VectorClock
from protocol.reasons import DropReason
from roles.learner.buffer import Buffer, Candidate, natural
from tests.build import a_clock
from tests.ground import a_candidate

MAX = 4


def at(version: int) -> VectorClock:
    """The only learner's clock at ``version``."""
    return VectorClock.of({"learner-1": version})


def filled(*candidates: Candidate, max_staleness: float = MAX) -> Buffer:
    buffer = Buffer(max_staleness)
    for candidate in candidates:
        buffer.put(candidate)
    return buffer


def ids(candidates: list[Candidate]) -> list[str]:
    return [candidate.group_id for candidate in candidates]


def reasons(buffer: Buffer) -> dict[str, DropReason]:
    return {drop.group_id: drop.reason for drop in buffer.take_dropped(99)}


def test_a_group_as_old_as_the_bound_is_used_and_an_older_one_is_dropped():
    buffer = filled(a_candidate("learner-1.0", clock=at(10)), a_candidate("learner-1.1", clock=at(11)))
    assert not buffer.ready(2, at(15), 15.0)
    assert ids(buffer.take(2, at(15), 15.0)) == ["learner-1.1"]
    assert reasons(buffer) == {"learner-1.0": DropReason.STALE}


def test_age_counts_from_the_start_of_the_group_to_the_learner_that_takes_it():
    # Started at version 10 and finished while the sampler had 12: five behind at 15, not three.
    started_at_10 = a_candidate(clock=at(10))
    assert filled(started_at_10).take(1, at(14), 14.0) == [started_at_10]
    assert filled(started_at_10).take(1, at(15), 15.0) == []


def test_a_group_ahead_of_the_learner_is_held_until_its_update_is_merged():
    ahead = a_candidate(clock=at(16))
    buffer = filled(ahead)
    assert not buffer.ready(1, at(15), 15.0)
    assert buffer.take(1, at(15), 15.0) == []
    assert buffer.take(1, at(16), 16.0) == [ahead]


def test_a_group_that_saw_a_peer_unknown_here_is_held_even_if_its_version_is_low():
    buffer = filled(a_candidate(clock=a_clock(b=1), version=1.0))
    assert buffer.take(1, a_clock(a=3), 3.0) == []
    assert ids(buffer.take(1, a_clock(a=3, b=1), 4.0)) == ["learner-1.0"]


def test_versions_that_differ_by_rounding_are_the_same_version():
    assert filled(a_candidate(version=1.0 - 1e-12), max_staleness=0).ready(1, GENESIS, 1.0)
    assert not filled(a_candidate(version=1.0 - 1e-6), max_staleness=0).ready(1, GENESIS, 1.0)


def test_fewer_than_two_scored_rollouts_teach_nothing():
    buffer = filled(
        a_candidate(rewards=(None, 1.0, None)), a_candidate("learner-1.1", rewards=(None, 1.0, 0.0))
    )
    assert reasons(buffer) == {"learner-1.0": DropReason.UNSCORABLE}
    assert ids(buffer.take(2, GENESIS, 0.0)) == ["learner-1.1"]


def test_the_order_of_a_step_does_not_depend_on_arrival():
    groups = [a_candidate(f"{learner}.{number}") for learner in ("a", "b") for number in (2, 10)]
    expected = ["a.2", "a.10", "b.2", "b.10"]
    for arrival in itertools.permutations(groups):
        assert ids(filled(*arrival).take(4, GENESIS, 0.0)) == expected


def test_the_oldest_groups_are_taken_first():
    buffer = filled(a_candidate("learner-1.7", clock=at(2)), a_candidate("learner-1.9", clock=at(1)))
    assert ids(buffer.take(1, at(2), 2.0)) == ["learner-1.9"]


def test_what_is_put_back_is_the_oldest_again_in_its_order():
    first, second, third = (a_candidate(f"learner-1.{number}") for number in (1, 2, 3))
    buffer = filled(first, second, third)
    taken = buffer.take(2, GENESIS, 0.0)
    buffer.put_back(taken, [])
    assert ids(buffer.take(1, GENESIS, 0.0)) == ["learner-1.1"]
    assert ids(buffer.take(1, GENESIS, 0.0)) == ["learner-1.2"]


def test_drops_that_are_put_back_wait_for_a_commit_again_before_later_ones():
    buffer = filled(a_candidate("learner-1.0", rewards=(None, None)))
    taken = buffer.take_dropped(99)
    buffer.put(a_candidate("learner-1.1", rewards=(None, None)))
    buffer.put_back([], taken)
    assert list(reasons(buffer)) == ["learner-1.0", "learner-1.1"]


def test_a_commit_takes_no_more_drops_than_fit():
    buffer = filled(*(a_candidate(f"learner-1.{n}", rewards=(None, None)) for n in range(5)))
    assert [len(buffer.take_dropped(2)) for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("fate", ["waits", "taken", "dropped", "drop taken"])
def test_everything_unacknowledged_is_kept_alive_until_it_is_committed(fate: str):
    candidate = a_candidate(rewards=(None, None) if "drop" in fate else (1.0, 0.0))
    buffer = filled(candidate)
    if fate == "taken":
        buffer.take(1, GENESIS, 0.0)
    if fate == "drop taken":
        buffer.take_dropped(1)
    assert buffer.leases == {"learner-1.0": candidate.lease}
    buffer.forget(["learner-1.0"])
    assert buffer.leases == {}


def test_a_group_dropped_from_outside_is_never_offered_but_held_until_it_is_committed():
    buffer = Buffer(4)
    buffer.drop(a_candidate(), DropReason.AHEAD)
    assert not buffer.ready(1, GENESIS, 0.0)
    assert list(buffer.leases) == ["learner-1.0"]
    assert reasons(buffer) == {"learner-1.0": DropReason.AHEAD}


def test_group_ids_sort_by_number_not_by_text():
    assert sorted(["a.10", "a.9", "odd"], key=natural) == ["a.9", "a.10", "odd"]


def test_a_buffer_that_is_not_causal_takes_groups_that_saw_more():
    buffer = Buffer(4, causal=False)
    buffer.put(a_candidate(clock=at(16), version=16.0))
    assert ids(buffer.take(1, at(15), 15.0)) == ["learner-1.0"]
