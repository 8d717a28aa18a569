"""A policy on several devices takes the steps of a policy on one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roles.learner.torch_policy import TorchPolicy
from tests.roles.learner.tiny_llama import a_spec, gradient_of, snapshot, some_samples, trained_factors

LOSS = {"kl_beta": 0.1, "correction": "truncate"}
LAYOUT = ("perf/", "batch/microbatches")
"""What depends on the number of devices."""


@pytest.fixture
def policies(model_dir):
    opened = []
    for devices in ("cpu", "cpu,cpu", "cpu,cpu,cpu"):
        policy = TorchPolicy.open(model_dir, a_spec(LOSS, micro_batch_tokens=20), devices)
        policy.load(trained_factors(policy))
        opened.append(policy)
    return opened


def test_loss_metrics_and_gradient_are_those_of_one_device(policies):
    results = [policy.step(some_samples(9), 0).metrics for policy in policies]
    one = {name: value for name, value in results[0].items() if not name.startswith(LAYOUT)}
    for several in results[1:]:
        assert {name: several[name] for name in one} == pytest.approx(one, abs=1e-6, rel=1e-5)


def test_after_several_steps_factors_are_those_of_one_device(policies):
    for update in range(3):
        for policy in policies:
            assert policy.step(some_samples(9, seed=update), update).updated
    one, *others = (policy.factors() for policy in policies)
    for several in others:
        for name, tensor in one.items():
            np.testing.assert_allclose(several[name], tensor, atol=1e-5)


def test_all_replicas_hold_what_was_loaded_and_what_was_learnt(policies):
    policy = policies[2]
    policy.step(some_samples(9), 0)
    first, *others = (
        torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])
        for model in policy._replicas.models
    )
    assert all(torch.equal(first, other) for other in others)


def test_a_step_on_several_devices_repeats_bit_for_bit(model_dir):
    seen = []
    for _ in range(2):
        policy = TorchPolicy.open(model_dir, a_spec(LOSS, micro_batch_tokens=20), "cpu,cpu")
        policy.load(trained_factors(policy))
        policy.step(some_samples(9), 0)
        seen.append(snapshot(policy))
    assert seen[0] == seen[1]


def test_no_gradient_is_left_anywhere(policies):
    policy = policies[1]
    policy.step(some_samples(9), 0)
    with pytest.raises(AssertionError):
        gradient_of(next(iter(policy._factors.values())))
    assert all(p.grad is None for model in policy._replicas.models for p in model.parameters())
