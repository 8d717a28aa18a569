"""Vector clocks are a join-semilattice, and their text and digest name them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from protocol.clock import GENESIS, VectorClock
from protocol.limits import COUNT_MAX, LEARNERS_MAX, NAME_MAX
from tests.build import a_clock
from tests.protocol.strategies import names

QUICK = settings(max_examples=100, deadline=None)

clocks = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3)).map(VectorClock.of)
far_clocks = st.dictionaries(names, st.integers(0, COUNT_MAX), max_size=3).map(VectorClock.of)
WIRE = TypeAdapter(VectorClock)


@QUICK
@given(clocks, clocks, clocks)
def test_join_is_commutative_associative_and_idempotent(a: VectorClock, b: VectorClock, c: VectorClock):
    assert a.join(b) == b.join(a)
    assert a.join(b).join(c) == a.join(b.join(c))
    assert a.join(a) == a == a.join(GENESIS)


@QUICK
@given(clocks, clocks, clocks)
def test_join_is_the_least_clock_that_contains_both(a: VectorClock, b: VectorClock, c: VectorClock):
    joined = a.join(b)
    assert a <= joined
    assert b <= joined
    assert (a <= c and b <= c) == (joined <= c)


@QUICK
@given(clocks, clocks, clocks)
def test_containment_is_a_partial_order(a: VectorClock, b: VectorClock, c: VectorClock):
    assert a <= a  # noqa: PLR0124 reflexive
    assert not (a <= b <= a) or a == b
    assert not (a <= b <= c) or a <= c
    assert a >= GENESIS


@QUICK
@given(clocks, clocks)
def test_a_clock_is_contained_exactly_when_joining_it_changes_nothing(a: VectorClock, b: VectorClock):
    assert (a <= b) == (a.join(b) == b)


@QUICK
@given(clocks, clocks)
def test_two_clocks_are_equal_or_ordered_or_concurrent(a: VectorClock, b: VectorClock):
    assert [a == b, a < b, b < a, a.concurrent(b)].count(True) == 1


@QUICK
@given(far_clocks, far_clocks)
def test_text_digest_and_hash_are_equal_exactly_when_the_clocks_are(a: VectorClock, b: VectorClock):
    for x, y in ((a, b), (a, VectorClock.of(dict(a.counts))), (clocked(a), clocked(b))):
        assert (x == y) == (x.text == y.text) == (x.digest == y.digest)
        assert x != y or hash(x) == hash(y)


def clocked(clock: VectorClock) -> VectorClock:
    """The clock with its learners inserted in the other order."""
    return VectorClock.of(dict(reversed(clock.counts)))


@QUICK
@given(far_clocks)
def test_a_clock_survives_the_wire(clock: VectorClock):
    assert WIRE.validate_json(WIRE.dump_json(clock)) == clock
    assert WIRE.validate_json(WIRE.dump_json(clock), strict=True) == clock


def test_an_absent_learner_counts_zero_and_zero_counts_as_absent():
    assert a_clock(a=0) == GENESIS == a_clock()
    assert a_clock(a=2)["b"] == 0


def test_canonical_text_is_sorted_and_stable():
    assert VectorClock.of({"b": 1, "a": 12}).text == str(a_clock(a=12, b=1)) == "a:12,b:1"
    assert GENESIS.text == "genesis"
    assert a_clock(a=12, b=1).digest == "c15ccc1e04241f33"


def test_a_learner_called_genesis_is_not_mistaken_for_it():
    assert a_clock(genesis=1).text != GENESIS.text


@pytest.mark.parametrize(
    "learner", ["", "A", "-a", "a.b", "a b", "a:1", "a,b", "a\n", "ä", "*", ">", "a" * (NAME_MAX + 1)]
)
def test_a_bad_learner_id_is_refused(learner: str):
    with pytest.raises(ValueError, match="not a learner id"):
        VectorClock.of({learner: 1})


@pytest.mark.parametrize("count", [-1, COUNT_MAX + 1, True, 1.0, "1", None])
def test_a_bad_count_is_refused(count: int):
    with pytest.raises(ValueError, match="not a count"):
        VectorClock.of({"a": count})


def test_a_clock_of_too_many_learners_is_refused():
    VectorClock.of({f"a{i}": 1 for i in range(LEARNERS_MAX)})
    with pytest.raises(ValueError, match="at most"):
        VectorClock.of({f"a{i}": 1 for i in range(LEARNERS_MAX + 1)})


@pytest.mark.parametrize("wire", ['[["a",1]]', '"a:1"', "1", "null", '{"a":"1"}', '{"a":1.0}', '{"A":1}'])
def test_only_an_object_of_counts_is_a_clock_on_the_wire(wire: str):
    with pytest.raises(ValidationError):
        WIRE.validate_json(wire)
