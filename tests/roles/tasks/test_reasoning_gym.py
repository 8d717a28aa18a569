"""A generated task set of reasoning-gym."""

from __future__ import annotations

import sys

import pytest

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.reasoning_gym import ANY_ANSWER, read
from roles.tasks.taskset import Row

SPEC = TasksSpec(source="reasoning-gym:chain_sum", rows_max=5)


def test_the_same_seed_gives_the_same_problems():
    assert list(read("chain_sum", SPEC, 3)) == list(read("chain_sum", SPEC, 3))
    assert list(read("chain_sum", SPEC, 3)) != list(read("chain_sum", SPEC, 4))


def test_a_problem_is_its_question_its_answer_and_its_metadata():
    rows = list(read("chain_sum", SPEC, 3))
    assert len(rows) == 5
    for row in rows:
        assert isinstance(row, Row)
        assert eval(row.prompt.partition(": ")[2].rstrip(" =")) == int(row.answer)
        assert row.metadata["source_dataset"] == "chain_sum"


def test_several_datasets_share_the_rows_evenly():
    rows = [row for row in read("chain_sum,countdown", SPEC, 3) if isinstance(row, Row)]
    assert [row.metadata["source_dataset"] for row in rows] == ["chain_sum"] * 3 + ["countdown"] * 2


def test_a_problem_that_names_no_answer_is_a_row_all_the_same():
    assert [row.answer for row in read("graph_color", SPEC, 0) if isinstance(row, Row)] == [ANY_ANSWER] * 5


def test_a_misspelt_dataset_is_answered_with_the_nearest_names():
    with pytest.raises(OperatorError, match="did you mean: chain_sum"):
        list(read("chainsum", SPEC, 0))


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(OperatorError, match=r"pip install 'grpo-node\[reasoning-gym\]'"):
        list(read("chain_sum", SPEC, 0))
