"""Composition: equal clocks give equal bytes, and what is no adapter of this run is refused."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.clock import GENESIS
from roles.policy.compose import Factors, compose, factors_digest, fault, policy_name
from tests.build import a_clock

QUICK = settings(max_examples=60, deadline=None)
A = "base_model.model.q_proj.lora_A.weight"
B = "base_model.model.q_proj.lora_B.weight"


def _filled(shape: tuple[int, ...], numbers: tuple[float, ...]) -> NDArray[np.float32]:
    count = shape[0] * shape[1]
    return np.array([numbers[i % len(numbers)] for i in range(count)], np.float32).reshape(shape)


def factors(*numbers: float) -> Factors:
    """Two tensors, A [2, 3] and B [3, 2], filled by repeating ``numbers``."""
    return {A: _filled((2, 3), numbers), B: _filled((3, 2), numbers)}


def four_tensors() -> Factors:
    return {f"layer.{i}.lora_{x}.weight": np.ones((2, 2), np.float32) for i in range(2) for x in "AB"}


numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=6, max_size=6)


@QUICK
@given(numbers, st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), numbers, max_size=4), st.randoms())
def test_a_policy_is_the_same_bytes_in_any_order_of_arrival(start, changes, random):
    genesis = factors(*start)
    updates = {learner: factors(*change) for learner, change in changes.items()}
    arrived = list(updates.items())
    random.shuffle(arrived)
    expected, got = compose(genesis, updates), compose(genesis, dict(arrived))
    assert factors_digest(got) == factors_digest(expected)
    assert all(got[name].tobytes() == expected[name].tobytes() for name in genesis)


def test_sums_in_order_of_arrival_would_differ():
    genesis = factors(0.0)
    updates = {"a": factors(1e8), "b": factors(1.0), "c": factors(-1e8)}
    by_arrival = set()
    for order in permutations(updates):
        total = genesis[A].copy()
        for learner in order:
            total += updates[learner][A]
        by_arrival.add(total.tobytes())
    assert len(by_arrival) > 1
    composed = {
        compose(genesis, {k: updates[k] for k in order})[A].tobytes() for order in permutations(updates)
    }
    assert len(composed) == 1


def test_a_policy_is_genesis_plus_one_update_per_learner():
    composed = compose(factors(1.0), {"b": factors(0.25), "a": factors(0.5)})
    assert composed[A].tolist() == [[1.75] * 3] * 2
    assert composed[B].dtype == np.float32


def test_composing_changes_neither_genesis_nor_the_updates():
    genesis, updates = factors(1.0), {"a": factors(2.0)}
    composed = compose(genesis, updates)
    composed[A] += 1
    assert genesis[A].tolist() == [[1.0] * 3] * 2
    assert updates["a"][A].tolist() == [[2.0] * 3] * 2
    assert compose(genesis, {})[A] is not genesis[A]


def test_a_tensor_of_the_run_is_no_fault():
    assert fault(factors(2.0), factors(1.0)) is None


def without(name: str) -> Factors:
    return {key: tensor for key, tensor in four_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (
            four_tensors() | {"layer.1.lora_B.weight": np.array([[1, 1], [np.nan, 1]], np.float32)},
            "layer.1.lora_B.weight is not finite",
        ),
        (without("layer.0.lora_A.weight"), "1 of 4 tensors are missing, first layer.0.lora_A.weight"),
        ({f"base.{name}": tensor for name, tensor in four_tensors().items()}, "4 of 4 tensors are missing"),
        (
            four_tensors() | {"layer.0.lora_A.weight": np.ones((4, 1), np.float32)},
            "has shape (4, 1), not (2, 2)",
        ),
        (four_tensors() | {"layer.2.lora_A.weight": np.ones((2, 2), np.float32)}, "1 unknown tensors"),
        (four_tensors() | {"layer.0.lora_B.weight": np.full((2, 2), np.inf, np.float32)}, "is not finite"),
        (four_tensors() | {"layer.0.lora_A.weight": np.ones((2, 2), np.float16)}, "is float16, not float32"),
        (four_tensors() | {"layer.0.lora_A.weight": np.ones((2, 2), np.float64)}, "is float64, not float32"),
        ({}, "4 of 4 tensors are missing"),
    ],
    ids=["nan", "three of four", "no name matches", "shape", "extra", "infinite", "half", "double", "empty"],
)
def test_what_is_no_adapter_of_this_run_is_refused_with_the_reason(candidate: Factors, words: str):
    assert words in str(fault(candidate, four_tensors()))


def test_the_digest_names_the_bytes_and_nothing_else():
    one = factors(1.0, 2.0, 3.0)
    assert factors_digest(one) == factors_digest(dict(reversed(one.items())))
    assert factors_digest({A: np.asfortranarray(one[A]), B: one[B]}) == factors_digest(one)
    others = [
        factors(1.0, 2.0, np.nextafter(np.float32(3.0), np.float32(4.0))),
        {A: one[B], B: one[A]},
        {A: one[A].reshape(3, 2), B: one[B]},
        {A: one[A]},
        {A: -np.abs(one[A]) * 0, B: one[B]},
        {A: np.abs(one[A]) * 0, B: one[B]},
    ]
    digests = [factors_digest(each) for each in (one, *others)]
    assert len(set(digests)) == len(digests)


def test_the_digest_is_frozen():
    assert factors_digest(factors(1.0, -0.5)) == (
        "ac6d1a588f63e048bacd3361e4aac5e43f286833a824e5ef0c65d448bcd987b9"
    )


def test_a_policys_name_belongs_to_one_clock_and_one_set_of_weights():
    one, two = (factors_digest(factors(value)) for value in (1.0, 2.0))
    names = [
        policy_name(clock, digest) for clock in (GENESIS, a_clock(a=1), a_clock(b=1)) for digest in (one, two)
    ]
    assert len(set(names)) == len(names)
    assert policy_name(a_clock(a=1), one) == names[2]
    assert all(name.isascii() and "/" not in name for name in names)
    assert all(one != two for one, two in pairwise(sorted(names)))
