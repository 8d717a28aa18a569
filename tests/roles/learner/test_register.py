"""The register: where a learner stands, as bytes that every peer composes alike."""

from __future__ import annotations

import itertools
from math import fsum

import numpy as np
import pytest

from protocol.learner_spec import LearnerSpec
from roles.learner.fake_policy import FakePolicy
from roles.learner.register import Published, Register
from roles.policy.bfloat16 import rounded
from roles.policy.compose import Factors, compose, factors_digest
from roles.policy.norm_bound import Step
from tests.build import a_clock

GENESIS = FakePolicy().genesis(0)
ROUNDED = LearnerSpec(update_dtype="bfloat16")


def moved(factors: Factors, seed: int) -> Factors:
    """``factors`` after some training."""
    generator = np.random.default_rng(seed)
    return {k: v + generator.normal(size=v.shape).astype(np.float32) for k, v in factors.items()}


def trained(register: Register, steps: int, weight: float = 1.0, seed: int = 0) -> list[Published]:
    return [register.publish(moved(register.base, seed + step), weight) for step in range(steps)]


def test_a_published_policy_is_genesis_plus_the_update_in_bytes():
    for update in trained(Register("a", GENESIS), 3):
        assert update.digest == factors_digest(compose(GENESIS, {"a": update.update}))
        assert factors_digest(update.policy) == update.digest


def test_counts_and_versions_rise_by_one_with_one_learner():
    updates = trained(Register("a", GENESIS), 3)
    assert [(u.clock.text, u.version, u.own_weight) for u in updates] == [
        ("a:1", 1.0, 1.0),
        ("a:2", 2.0, 2.0),
        ("a:3", 3.0, 3.0),
    ]


def test_a_resumed_register_continues_to_the_same_bytes():
    whole = Register("a", GENESIS)
    last = trained(whole, 3)[-1]
    resumed = Register("a", GENESIS)
    resumed.resume(last.update, 3, last.own_weight)
    assert (resumed.clock, resumed.version) == (whole.clock, whole.version)
    assert trained(resumed, 2, seed=9)[-1].digest == trained(whole, 2, seed=9)[-1].digest


def test_the_weight_is_baked_into_the_update():
    half, full = Register("a", GENESIS), Register("a", GENESIS)
    goal = moved(GENESIS, 1)
    small, large = half.publish(goal, 0.5), full.publish(goal, 1.0)
    for name in GENESIS:
        np.testing.assert_array_equal(small.update[name], np.float32(0.5) * large.update[name])
    assert (small.version, large.version) == (0.5, 1.0)


def test_an_update_with_an_earlier_weight_keeps_it():
    register = Register("a", GENESIS)
    before = trained(register, 1, weight=1.0)[0].update
    after = register.publish(register.base, 0.25).update
    for name in GENESIS:
        np.testing.assert_array_equal(before[name], after[name])


def test_merging_a_peer_keeps_unpublished_progress():
    register = Register("a", GENESIS)
    trained(register, 1)
    peer = trained(Register("b", GENESIS), 1, seed=5)[0]
    before, progress = register.base, moved(register.base, 7)
    merged = register.merge("b", peer.update, 1, 1.0, progress)
    for name in GENESIS:
        np.testing.assert_array_equal(merged[name], register.base[name] + (progress[name] - before[name]))
    assert (register.clock, register.version) == (a_clock(a=1, b=1), 2.0)


def test_learners_that_publish_and_merge_in_any_order_reach_the_same_bytes():
    own = {
        name: trained(Register(name, GENESIS), 2, weight=1 / 3, seed=i)[-1] for i, name in enumerate("abc")
    }
    digests, versions = set(), set()
    for order in itertools.permutations("abc"):
        first, *peers = order
        register = Register(first, GENESIS)
        register.resume(own[first].update, 2, own[first].own_weight)
        for peer in peers:
            register.merge(peer, own[peer].update, 2, own[peer].own_weight, register.base)
        assert register.clock == a_clock(a=2, b=2, c=2)
        digests.add(factors_digest(register.base))
        versions.add(register.version)
    assert digests == {factors_digest(compose(GENESIS, {name: u.update for name, u in own.items()}))}
    assert versions == {fsum(u.own_weight for u in own.values())}


def test_two_learners_that_exchange_updates_hold_the_same_policy_at_the_same_clock():
    a, b = Register("a", GENESIS), Register("b", GENESIS)
    first_a = a.publish(moved(GENESIS, 1), 0.5)
    b.merge("a", first_a.update, 1, first_a.own_weight, b.base)
    first_b = b.publish(moved(b.base, 2), 0.5)
    second_a = a.publish(moved(a.base, 3), 0.5)
    a.merge("b", first_b.update, 1, first_b.own_weight, a.base)
    b.merge("a", second_a.update, 2, second_a.own_weight, b.base)
    assert a.clock == b.clock == a_clock(a=2, b=1)
    assert factors_digest(a.base) == factors_digest(b.base)


def test_the_count_of_a_peer_never_decreases():
    register, peer = Register("a", GENESIS), trained(Register("b", GENESIS), 2)
    register.merge("b", peer[1].update, 2, 2.0, register.base)
    with pytest.raises(ValueError, match="the count of b never decreases"):
        register.merge("b", peer[0].update, 1, 1.0, register.base)
    assert register.clock == a_clock(b=2)


def test_an_update_records_the_norm_of_its_step_at_weight_one():
    register = Register("a", GENESIS)
    for weight in (1.0, 0.25):
        goal = {name: tensor + np.float32(2.0) for name, tensor in register.base.items()}
        published = register.publish(goal, weight)
        assert published.step_norm == pytest.approx(2.0 * 32**0.5, rel=1e-5)
    assert published.step == Step(published.step_norm, 1.25)


def test_the_norm_of_a_step_that_is_not_finite_is_not_finite():
    goal = {name: np.full_like(tensor, np.nan) for name, tensor in GENESIS.items()}
    assert not np.isfinite(Register("a", GENESIS).publish(goal, 1.0).step_norm)
    huge = {name: np.full_like(tensor, 3.4e38) for name, tensor in GENESIS.items()}
    assert not np.isfinite(Register("a", GENESIS, ROUNDED).publish(huge, 1.0).step_norm)


def test_what_merged_updates_record_of_their_steps_is_known_of_the_newest():
    register, peer = Register("a", GENESIS), trained(Register("b", GENESIS), 2)
    for count, update in enumerate(peer, 1):
        register.merge("b", update.update, count, float(count), register.base, update.step)
    assert register.peers_steps == [peer[1].step]


# --- updates that are stored as bfloat16 ---------------------------------------------------------


def small_steps(settings: LearnerSpec, steps: int = 1000) -> tuple[Register, Factors]:
    """A register after many steps that are small beside what was published before, and their exact sum."""
    register = Register("a", GENESIS, settings)
    first = register.publish({name: tensor + np.float32(1.0) for name, tensor in GENESIS.items()}, 1.0)
    exact = {name: tensor.astype(np.float64) for name, tensor in first.update.items()}
    generator = np.random.default_rng(0)
    for _ in range(steps):
        before = register.base
        goal = {k: t + generator.uniform(0, 2e-4, t.shape).astype(np.float32) for k, t in before.items()}
        register.publish(goal, 0.5)
        exact = {k: t + 0.5 * (goal[k].astype(np.float64) - before[k]) for k, t in exact.items()}
    return register, exact


def test_feeding_the_error_back_keeps_a_thousand_small_steps_within_one_rounding():
    """Rounding to bfloat16 takes up to 2^-8 of a number near 1: more than any of these steps."""
    register, exact = small_steps(ROUNDED)
    published = register.publish(register.base, 1.0).update
    for name, tensor in exact.items():
        moved = tensor - published[name]
        assert np.abs(moved).max() <= 2**-8 * np.abs(tensor).max()
        assert (tensor > 1.04).all()


def test_rounding_without_feeding_back_would_lose_them(monkeypatch: pytest.MonkeyPatch):
    publish = Register.publish

    def forgetful(register: Register, factors: Factors, weight: float) -> Published:
        register.residual = {}
        return publish(register, factors, weight)

    monkeypatch.setattr(Register, "publish", forgetful)
    register, exact = small_steps(ROUNDED)
    published = register.publish(register.base, 1.0).update
    for name, tensor in exact.items():
        assert np.abs(published[name] - 1.0).max() < 2**-8, "nothing moved at all"
        assert np.abs(tensor - published[name]).min() > 2**-8 * np.abs(tensor).max()


def test_a_rounded_update_is_what_is_trained_on_and_composed():
    register = Register("a", GENESIS, ROUNDED)
    for update in trained(register, 3):
        for tensor in update.update.values():
            np.testing.assert_array_equal(rounded(tensor), tensor)
        assert update.digest == factors_digest(compose(GENESIS, {"a": update.update}))
        assert update.dtype == "bfloat16"
        assert register.residual


def test_a_residual_that_is_put_back_continues_to_the_same_bytes_and_without_it_loses_one_rounding():
    whole = Register("a", GENESIS, ROUNDED)
    last = trained(whole, 3)[-1]
    resumed, poorer = Register("a", GENESIS, ROUNDED), Register("a", GENESIS, ROUNDED)
    for register in (resumed, poorer):
        register.resume(last.update, 3, last.own_weight)
        assert register.residual == {}
    resumed.residual = whole.residual
    expected, same, other = (trained(register, 1, seed=9)[0] for register in (whole, resumed, poorer))
    assert same.digest == expected.digest
    for name, tensor in expected.update.items():
        np.testing.assert_allclose(other.update[name], tensor, rtol=2**-7, atol=2**-7)


def test_a_residual_of_other_factors_is_refused():
    with pytest.raises(ValueError, match="not a residual of this run"):
        Register("a", GENESIS, ROUNDED).residual = {"other": np.zeros(1, np.float32)}


def test_a_copy_keeps_its_own_residual():
    register = Register("a", GENESIS, ROUNDED)
    trained(register, 1)
    twin, before = register.copy(), register.residual
    trained(register, 1, seed=5)
    assert twin.residual is before
    assert register.residual is not before


def test_a_float32_register_has_no_residual():
    register = Register("a", GENESIS)
    trained(register, 1)
    register.residual = register.base
    assert register.residual == {}
