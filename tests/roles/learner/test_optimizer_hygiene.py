"""The trainable policy behind the stepper: what is not finite, or nothing, never reaches an update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from node.system_clock import SystemClock
from roles.learner.batch import Batch
from roles.learner.policy import Sample
from roles.learner.register import Register
from roles.learner.stepper import StepOutcome, Stepper
from tests.roles.learner.tiny_llama import snapshot, some_samples

LEARNER = {"schedule": "cosine", "warmup_updates": 2, "updates": 10, "weight_decay": 0.1}


@pytest.fixture
def policy(open_policy):
    return open_policy({"mask_truncated": True}, **LEARNER)


@pytest.fixture
def stepper(policy):
    return Stepper(policy, Register("learner-1", policy.factors()), SystemClock())


def poisoned(sample: Sample) -> Sample:
    return replace(sample, sampler_logprobs=np.full_like(sample.sampler_logprobs, np.nan))


def cut(sample: Sample) -> Sample:
    return replace(sample, truncated=True)


def step(stepper: Stepper, samples: list[Sample], every: int = 1) -> StepOutcome:
    return stepper.step(Batch(tuple(samples), {}, 0.0), 1.0, every)


FAULTS = [poisoned, cut]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_or_all_masked_is_no_update(stepper, policy, fault):
    before = snapshot(policy)
    outcome = step(stepper, [fault(sample) for sample in some_samples()])
    assert outcome.published is None
    assert stepper.register.count == 0
    assert snapshot(policy) == before


@pytest.mark.parametrize("fault", FAULTS)
def test_such_a_step_does_not_move_the_schedule(stepper, fault):
    rates = [
        step(stepper, samples).result.metrics["learning_rate"]
        for samples in (some_samples(), [fault(s) for s in some_samples()], some_samples(seed=1))
    ]
    assert rates == pytest.approx([0.005, 0.01, 0.01])


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_of_several_steps_is_that_of_its_good_ones(open_policy, fault):
    updates = []
    for spoilt in (False, True):
        policy = open_policy({"mask_truncated": True}, **LEARNER)
        stepper = Stepper(policy, Register("learner-1", policy.factors()), SystemClock())
        if spoilt:
            step(stepper, [fault(sample) for sample in some_samples(seed=3)], every=2)
        outcome = step(stepper, some_samples(), every=1 + spoilt)
        assert outcome.published is not None
        updates.append(outcome.published.digest)
    assert updates[0] == updates[1]


def test_warm_up_goes_by_updates_and_not_by_steps(stepper):
    rates = [step(stepper, some_samples(seed=i), 2).result.metrics["learning_rate"] for i in range(5)]
    assert rates == pytest.approx([0.005, 0.005, 0.01, 0.01, 0.01])
