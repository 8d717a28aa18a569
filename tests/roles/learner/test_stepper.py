"""The stepper: policy and register move together, and return together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.virtual_time import VirtualClock, in_virtual_time
from protocol.learner_spec import LearnerSpec
from protocol.manifest import EntryKind, Manifest
from protocol.runspec import LossSpec
from roles.learner.batch import Batch, make_batch
from roles.learner.fake_policy import FakePolicy
from roles.learner.register import Register
from roles.learner.stepper import StepOutcome, Stepper
from roles.policy.compose import factors_digest
from roles.policy.policies import Update
from tests.build import a_clock
from tests.ground import a_candidate, an_update

GENESIS = FakePolicy().genesis(0)


def a_stepper(learning_rate: float = 0.01, **settings: Any) -> tuple[Stepper, FakePolicy]:
    policy = FakePolicy(learning_rate)
    register = Register("learner-1", GENESIS, LearnerSpec(**settings))
    return Stepper(policy, register, VirtualClock()), policy


def a_batch(number: int = 0, rewards: tuple[float, float] = (1.0, 0.0)) -> Batch:
    """A group of completions that differ, or their pulls would cancel."""
    candidate = a_candidate(f"learner-1.{number}", rewards=rewards)
    batch = make_batch([candidate], LossSpec(), candidate.group.clock, 0.0)
    samples = tuple(replace(s, token_ids=s.token_ids + 3 * i) for i, s in enumerate(batch.samples))
    return replace(batch, samples=samples)


def a_peers_update(count: int, author: str = "b", step_norm: float = 0.0) -> Update:
    """A peer's update whose every entry is ``count``, of weight 1/2 each; it records ``step_norm``."""
    manifest = Manifest(
        path=f"r/u/{author}/{count}",
        kind=EntryKind.UPDATE,
        run="r",
        author=author,
        count=count,
        weight=count / 2,
        step_norm=step_norm,
        files=(),
    )
    return Update(manifest, an_update(GENESIS, count))


def step(stepper: Stepper, rewards: tuple[float, float] = (1.0, 0.0), every: int = 1) -> StepOutcome:
    return stepper.step(a_batch(rewards=rewards), 1.0, every)


def digest(policy: FakePolicy) -> str:
    return factors_digest(policy.factors())


@in_virtual_time
async def test_a_learner_goes_on_from_exactly_what_its_peers_compose():
    stepper, policy = a_stepper()
    outcome = step(stepper)
    assert outcome.published is not None
    assert digest(policy) == outcome.published.digest == factors_digest(stepper.register.base)


@in_virtual_time
async def test_an_update_is_made_every_so_many_steps():
    stepper, policy = a_stepper()
    outcomes = [step(stepper, every=3) for _ in range(6)]
    assert [o.due for o in outcomes] == [False, False, True] * 2
    assert [o.published.clock.text for o in outcomes if o.published] == ["learner-1:1", "learner-1:2"]
    assert policy.updates_seen == [0, 0, 0, 1, 1, 1]


@in_virtual_time
async def test_steps_that_change_nothing_publish_nothing_but_are_due():
    stepper, _ = a_stepper()
    outcomes = [step(stepper, every=2, rewards=(1.0, 1.0)) for _ in range(2)]
    assert outcomes[1].published is None
    assert outcomes[1].after is not None
    assert outcomes[1].after.register.count == 0


@in_virtual_time
async def test_one_step_that_changed_something_is_enough_for_an_update():
    stepper, _ = a_stepper()
    step(stepper, every=2)
    assert step(stepper, every=2, rewards=(1.0, 1.0)).published is not None


@in_virtual_time
async def test_a_restored_stepper_repeats_the_same_bytes():
    stepper, policy = a_stepper()
    step(stepper)
    point = stepper.safe_point()
    first = step(stepper).published
    stepper.restore(point)
    assert (stepper.register.count, digest(policy)) == (1, factors_digest(point.register.base))
    again = step(stepper).published
    assert first is not None
    assert again is not None
    assert (again.digest, again.clock) == (first.digest, first.clock)


@in_virtual_time
async def test_a_safe_point_is_not_moved_by_later_steps():
    stepper, _ = a_stepper()
    point = stepper.safe_point()
    momentum = point.state()["momentum.layer.lora_B.weight"].copy()
    step(stepper)
    assert point.register.count == 0
    np.testing.assert_array_equal(point.state()["momentum.layer.lora_B.weight"], momentum)


@in_virtual_time
async def test_later_steps_and_merges_change_no_byte_of_an_earlier_safe_point():
    """It shares its tensors with the register that goes on."""
    stepper, policy = a_stepper()
    stepper.merge("b", a_peers_update(1))
    step(stepper)
    point = stepper.safe_point()
    clock, version, base = point.register.clock, point.register.version, factors_digest(point.register.base)
    expected = step(stepper).published
    stepper.merge("b", a_peers_update(2))
    stepper.merge("c", a_peers_update(1, "c"))
    step(stepper)
    assert (point.register.clock, point.register.version) == (clock, version)
    assert factors_digest(point.register.base) == base
    stepper.restore(point)
    step(stepper)
    step(stepper)
    stepper.restore(point)
    again = step(stepper).published
    assert expected is not None
    assert again is not None
    assert (again.clock, again.digest) == (expected.clock, expected.digest)
    assert factors_digest(again.update) == factors_digest(expected.update)
    assert digest(policy) == expected.digest


@in_virtual_time
async def test_what_was_trained_since_a_safe_point_does_not_count_towards_the_next_update():
    stepper, _ = a_stepper()
    point = stepper.safe_point()
    step(stepper, every=2)
    stepper.restore(point)
    assert [step(stepper, every=2).due, step(stepper, every=2).due] == [False, True]


@in_virtual_time
async def test_merging_between_steps_keeps_unpublished_progress_and_momentum():
    stepper, policy = a_stepper()
    step(stepper, every=2)
    before, momentum = policy.factors(), policy.state().result()
    stepper.merge("b", a_peers_update(1))
    for name, tensor in policy.factors().items():
        np.testing.assert_allclose(tensor, before[name] + 1, atol=1e-6)
    for name, tensor in momentum.items():
        np.testing.assert_array_equal(policy.state().result()[name], tensor)
    outcome = step(stepper, every=2)
    assert outcome.published is not None
    assert (outcome.published.clock, outcome.published.version) == (a_clock(b=1, **{"learner-1": 1}), 1.5)


@in_virtual_time
async def test_three_steps_a_restart_and_three_more_are_six_steps():
    """Momentum, counts and factors are all there is to resume."""
    whole, policy = a_stepper()
    for _ in range(6):
        step(whole)
    first, _ = a_stepper()
    published = [step(first).published for _ in range(3)][-1]
    assert published is not None
    register = Register("learner-1", GENESIS)
    register.resume(published.update, 3, published.own_weight)
    resumed_policy = FakePolicy()
    resumed = Stepper(resumed_policy, register, VirtualClock())
    resumed.load_state(first.safe_point().state())
    for _ in range(3):
        step(resumed)
    assert digest(resumed_policy) == digest(policy)
    assert resumed_policy.updates_seen == [3, 4, 5]


@in_virtual_time
async def test_the_learning_rate_goes_by_the_version_so_that_a_late_learner_uses_its_peers():
    stepper, policy = a_stepper()
    step(stepper)
    stepper.merge("b", a_peers_update(6))
    step(stepper)
    assert policy.updates_seen == [0, 4]


@pytest.mark.parametrize("weight", [0.1, 1 / 3, 0.7])
@in_virtual_time
async def test_a_version_that_only_rounding_keeps_below_a_whole_number_is_that_number(weight: float):
    stepper, policy = a_stepper()
    for _ in range(31):
        stepper.step(a_batch(), weight)
    assert policy.updates_seen == [int(round(n * weight, 6)) for n in range(31)]


@in_virtual_time
async def test_a_step_out_of_proportion_is_not_published_and_leaves_no_trace():
    """All groups of it are consumed, as after a step that was not finite."""
    stepper, policy = a_stepper()
    norm = step(stepper).result.metrics["step/norm"]
    stepper.merge("b", a_peers_update(1, step_norm=norm))
    point, before = stepper.safe_point(), digest(policy)
    policy._learning_rate *= 1000
    outcome = step(stepper, every=2), step(stepper, every=2)
    assert (outcome[1].due, outcome[1].published, outcome[1].result.updated) == (True, None, False)
    assert outcome[1].result.metrics["step/skipped_out_of_proportion_total"] == 1.0
    assert digest(policy) == before == factors_digest(stepper.register.base)
    assert outcome[1].after is not None
    assert outcome[1].after.register.clock == point.register.clock
    for name, tensor in point.state().items():
        np.testing.assert_array_equal(policy.state().result()[name], tensor)
    policy._learning_rate /= 1000
    assert step(stepper).published is not None


@in_virtual_time
async def test_what_a_learner_publishes_passes_its_own_bound_and_what_it_does_not_would_not():
    for factor, passes in ((9.0, True), (11.0, False)):
        stepper, _ = a_stepper()
        norm = a_stepper()[0].step(a_batch(), 1.0).result.metrics["step/norm"]
        stepper.merge("b", a_peers_update(1, step_norm=norm / factor))
        assert (step(stepper).published is not None) is passes


@in_virtual_time
async def test_a_step_that_is_not_finite_is_not_published_whatever_the_bound():
    stepper, policy = a_stepper(step_norm_max=0.0)
    policy._learning_rate = float("inf")
    with np.errstate(invalid="ignore"):
        outcome = step(stepper)
    assert (outcome.published, outcome.result.updated) == (None, False)
    assert all(np.isfinite(value) for value in outcome.result.metrics.values())
    assert digest(policy) == factors_digest(GENESIS)


@in_virtual_time
async def test_the_residual_of_rounded_updates_is_saved_with_the_optimizers_state():
    whole, policy = a_stepper(update_dtype="bfloat16")
    published = [step(whole).published for _ in range(3)][-1]
    assert published is not None
    resumed, other = a_stepper(update_dtype="bfloat16")
    resumed.register.resume(published.update, 3, published.own_weight)
    resumed.restore(resumed.safe_point())
    resumed.load_state(whole.safe_point().state())
    step(whole)
    step(resumed)
    assert digest(other) == digest(policy)


@in_virtual_time
async def test_a_residual_that_was_published_since_is_not_used_again():
    stepper, _ = a_stepper(update_dtype="bfloat16")
    step(stepper)
    old = stepper.safe_point().state()
    step(stepper)
    newer = stepper.register.residual
    stepper.load_state(old)
    assert stepper.register.residual is newer


@in_virtual_time
async def test_a_restored_stepper_repeats_the_same_rounded_bytes():
    stepper, _ = a_stepper(update_dtype="bfloat16")
    step(stepper)
    point = stepper.safe_point()
    first = step(stepper).published
    stepper.restore(point)
    again = step(stepper).published
    assert first is not None
    assert again is not None
    assert again.digest == first.digest
