"""Which tasks are settled: the floor moves over them, in whatever order they come."""

from __future__ import annotations

import itertools

import pytest

from roles.learner.outstanding import Cursor, Outstanding


def test_the_floor_moves_over_settled_tasks_in_whatever_order():
    for order in itertools.permutations(range(4)):
        tasks = Outstanding(cursor=6)
        for number in order:
            tasks.settle([number])
        assert (tasks.floor, tasks.all()) == (4, [4, 5])


def test_a_gap_holds_the_floor():
    tasks = Outstanding(2, 8)
    tasks.settle([3, 4, 7])
    assert (tasks.floor, tasks.oldest(2)) == (2, [2, 5])


def test_settling_twice_or_what_was_settled_before_changes_nothing():
    tasks = Outstanding(2, 4)
    tasks.settle([0, 1, 900])
    tasks.settle([2, 2])
    assert (tasks.floor, tasks.all()) == (3, [3])


def test_a_task_may_be_settled_before_its_issuer_knows_that_it_was_issued():
    tasks = Outstanding(2, 4)
    tasks.settle([2, 3, 4, 6])
    assert (tasks.floor, tasks.all()) == (4, [])
    tasks.issued(3)
    assert (tasks.floor, tasks.all()) == (5, [5])


@pytest.mark.parametrize("cursor", [Cursor(0), Cursor(17), Cursor(17, 0), Cursor(3, 4)])
def test_a_cursor_is_read_as_it_was_written(cursor: Cursor):
    assert Cursor.parse(str(cursor).encode()) == cursor


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"3 x", b"\xff", b"3  4", b"3 4 5"])
def test_a_cursor_that_cannot_be_read_counts_as_lost(value: bytes):
    assert Cursor.parse(value) == Cursor(0, 0)
    assert Cursor.parse(value).restored
