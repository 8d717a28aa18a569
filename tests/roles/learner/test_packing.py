"""Which samples share a forward pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roles.learner.packing import micro_batches


@given(st.lists(st.integers(1, 200)), st.integers(1, 500))
def test_every_sample_is_in_one_batch_and_every_batch_within_the_budget(lengths, budget):
    batches = micro_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def test_neighbours_in_length_share_a_batch():
    assert micro_batches([3, 10, 4, 9, 3], 20) == [[1, 3], [2, 0, 4]]


def test_a_sample_longer_than_the_budget_is_alone():
    assert micro_batches([2, 50, 2], 10) == [[1], [0, 2]]
