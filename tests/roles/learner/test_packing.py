"""Which samples share a forward pass."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roles.learner.packing import Part, micro_batches, pack
from roles.learner.policy import Sample

GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=8)),
    min_size=1,
    max_size=8,
)
"""Prompt length and completion lengths of each group."""


def samples_of(groups: list[tuple[int, list[int]]]) -> list[Sample]:
    found = []
    for number, (prompt, lengths) in enumerate(groups):
        ids = np.full(prompt, number, np.int32)
        for length in lengths:
            some = np.zeros(length, np.int32)
            found.append(Sample(ids, some, some.astype(np.float32), 1.0, truncated=False, temperature=1.0))
    return found


def cost(samples: list[Sample], part: Part) -> int:
    some = [samples[index] for index in part.samples]
    assert len({sample.prompt_token_ids.tobytes() for sample in some}) == 1, "a part has one prompt"
    return len(some[0].prompt_token_ids) + sum(len(sample.token_ids) - 1 for sample in some)


@given(GROUPS, st.integers(1, 400))
def test_every_sample_is_in_one_row_and_every_row_within_the_budget(groups, budget):
    samples = samples_of(groups)
    rows = pack(samples, budget)
    assert sorted(i for row in rows for part in row for i in part.samples) == list(range(len(samples)))
    for row in rows:
        assert [part.tokens for part in row] == [cost(samples, part) for part in row]
        largest = max(cost(samples, Part((i,), 0)) for part in row for i in part.samples)
        assert sum(part.tokens for part in row) <= max(budget, largest)


@given(GROUPS)
def test_a_group_that_fits_has_its_prompt_once(groups):
    samples = samples_of(groups)
    (row,) = pack(samples, 10_000)
    assert len(row) == len(groups)


def test_rows_are_balanced():
    rows = pack(samples_of([(10, [21])] * 4 + [(10, [11])] * 4), 60)
    assert [sum(part.tokens for part in row) for row in rows] == [50, 50, 50, 50]


def test_a_group_too_large_for_a_row_is_split_about_evenly():
    rows = pack(samples_of([(100, [51] * 8)]), 310)
    assert [[part.tokens for part in row] for row in rows] == [[300], [300]]


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
