"""Where rows stand in the cache when others have left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roles.sampler.transformers_cache import packed
from roles.sampler.transformers_lora import runs_of

ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=20)


@given(ROWS)
def test_everybody_who_stays_has_one_place_among_rows_of_the_same_policy(rows: list[tuple[str, bool]]):
    kinds, alive = [kind for kind, _ in rows], [stays for _, stays in rows]
    order = packed(alive, runs_of(kinds))
    assert sorted(order) == [place for place, stays in enumerate(alive) if stays]
    runs = [[kinds[place] for place in range(start, end) if alive[place]] for start, end in runs_of(kinds)]
    assert [kinds[place] for place in order] == [kind for run in runs for kind in run]


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_of_one_policy_only_rows_beyond_the_new_end_move(alive: list[bool]):
    order = packed(alive, [(0, len(alive))])
    moved = [source for place, source in enumerate(order) if place != source]
    assert all(source >= len(order) for source in moved)


def test_the_last_rows_of_a_policy_close_its_gaps():
    alive = [True, False, True, True, False, True]
    assert packed(alive, [(0, 4), (4, 6)]) == [0, 3, 2, 5]
