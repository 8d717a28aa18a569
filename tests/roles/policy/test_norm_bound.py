"""The norm bound: one verdict for everybody, from what manifests record."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from protocol.learner_spec import LearnerSpec
from protocol.manifest import EntryKind, Manifest
from roles.learner.fake_policy import FakePolicy
from roles.policy.chains import PREVIOUS
from roles.policy.norm_bound import Step, lie, out_of_proportion, step_norm
from tests.ground import an_update

GENESIS = FakePolicy().genesis(0)
ENTRIES = 32
"""Numbers of the fake policy's factors: a step of 1 in every one has norm sqrt(32)."""


def steps(*norms: float, version: float = 100.0) -> list[Step]:
    return [Step(norm, version) for norm in norms]


def judge(norm: float, *peers: float, **settings: Any) -> str | None:
    return out_of_proportion(Step(norm, 100.0), steps(*peers), LearnerSpec(**settings))


def test_the_norm_is_over_all_factors_and_at_weight_one():
    two, three = an_update(GENESIS, 2), an_update(GENESIS, 3)
    assert step_norm(three, two, 1.0) == pytest.approx(math.sqrt(ENTRIES))
    assert step_norm(three, two, 0.25) == pytest.approx(4 * math.sqrt(ENTRIES))
    assert step_norm(three, None, 1.0) == pytest.approx(3 * math.sqrt(ENTRIES))
    assert step_norm(three, three, 1.0) == 0.0


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_the_norm_of_what_is_not_finite_is_not_finite(number: float):
    assert step_norm({"a": np.array([[1.0, number]], np.float32)}, None, 1.0) == math.inf
    both = {"a": np.array([[np.inf]], np.float32)}
    assert step_norm(both, both, 1.0) == math.inf
    assert step_norm(GENESIS, None, 0.0) == math.inf


def test_a_step_is_refused_beyond_so_many_times_the_median_of_its_peers():
    assert judge(10.0, 1.0, 1.0, 1.0) is None
    assert judge(10.001, 1.0, 1.0, 1.0)
    assert judge(10.001, 0.5, 1.1, 5.0) is None
    assert judge(4.0, 1.0, step_norm_max=3.0)
    assert judge(20.0, 1.0, 3.0) is None, "of two the mean"


def test_the_reason_names_both_norms():
    assert judge(250.0, 2.0, 2.0) == (
        "a step of norm 250 at weight 1 is more than 10 times 2, the median of its peers"
    )


def test_without_peers_there_is_no_bound_but_to_be_finite():
    assert judge(1e30) is None
    assert judge(math.inf)
    assert judge(math.nan)


def test_a_peer_that_did_not_move_or_records_nothing_is_no_measure():
    assert judge(1e30, 0.0, 0.0) is None
    assert judge(11.0, 0.0, 1.0)


def test_zero_switches_the_bound_off():
    assert judge(1e30, 1.0, step_norm_max=0.0) is None
    assert judge(math.inf, 1.0, step_norm_max=0.0)


def test_the_order_of_the_peers_does_not_matter():
    peers = steps(0.3, 4.0, 1.0, 9.0)
    verdicts = {
        out_of_proportion(Step(26.0, 1.0), order, LearnerSpec()) for order in itertools.permutations(peers)
    }
    assert len(verdicts) == 1
    assert None not in verdicts


def test_a_peer_that_left_early_in_the_warm_up_does_not_hold_the_others_to_its_small_steps():
    settings = LearnerSpec(warmup_updates=50)
    left = steps(0.02, version=0.5)
    assert out_of_proportion(Step(1.0, 60.0), left, settings) is None
    assert out_of_proportion(Step(1.0, 60.0), left, LearnerSpec())
    assert out_of_proportion(Step(10.1, 60.0), left, settings)


def test_a_peer_further_in_the_warm_up_is_taken_as_it_is():
    settings = LearnerSpec(warmup_updates=50)
    assert out_of_proportion(Step(9.0, 1.0), steps(1.0), settings) is None
    assert out_of_proportion(Step(11.0, 1.0), steps(1.0), settings)


def test_thirds_that_do_not_add_up_in_binary_are_as_far_in_the_warm_up_as_the_whole():
    six_thirds = sum([1 / 3] * 6)
    assert six_thirds < 2
    settings = LearnerSpec(warmup_updates=50)
    assert out_of_proportion(Step(11.0, 2.0), steps(1.0, version=six_thirds), settings)
    assert out_of_proportion(Step(14.0, six_thirds), steps(1.0, version=1.0), settings) is None


def a_manifest(count: int, norm: float, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "path": f"r/u/a/{count}",
        "kind": EntryKind.UPDATE,
        "run": "r",
        "author": "a",
        "count": count,
        "weight": float(count),
        "step_norm": norm,
        "files": (),
        "extra": {PREVIOUS: f"r/u/a/{count - 1}"} if count > 1 else {},
    }
    return Manifest(**(fields | changes))


def test_a_manifest_that_lies_about_its_step_is_found_out_with_the_update_before_at_hand():
    honest, update = math.sqrt(ENTRIES), an_update(GENESIS, 2)
    before = (a_manifest(1, honest), an_update(GENESIS, 1))
    assert lie(a_manifest(2, honest), update, before) is None
    assert lie(a_manifest(2, honest * 1.005), update, before) is None
    for told in (0.0, honest * 0.98, honest * 1.02):
        assert lie(a_manifest(2, told), update, before)
    assert lie(a_manifest(2, 0.0), update, None) is None, "nobody can tell"


def test_only_the_update_that_the_manifest_names_is_the_one_before():
    orphan = (a_manifest(1, 1.0, path="r/u/a/1-orphan"), an_update(GENESIS, 1))
    assert lie(a_manifest(2, 0.0), an_update(GENESIS, 2), orphan) is None


def test_a_first_update_has_nothing_before_it_and_cannot_lie():
    assert lie(a_manifest(1, math.sqrt(ENTRIES)), an_update(GENESIS, 1), None) is None
    assert lie(a_manifest(1, 1.0), an_update(GENESIS, 1), None)


def test_an_update_whose_weight_does_not_grow_is_a_lie():
    before = (a_manifest(1, 1.0, weight=2.0), an_update(GENESIS, 1))
    assert lie(a_manifest(2, math.sqrt(ENTRIES)), an_update(GENESIS, 2), before)
