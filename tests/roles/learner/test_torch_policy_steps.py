"""Steps of the trainable policy: what changes nothing, what is taken back, and restarts that are exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch

from roles.learner.policy import Sample
from roles.learner.torch_policy import TorchPolicy
from tests.roles.learner.tiny_llama import snapshot, some_samples

# --- steps that change nothing ------------------------------------------------------------------


def test_a_step_whose_samples_are_all_truncated_changes_nothing(open_policy):
    policy = open_policy({"mask_truncated": True})
    policy.step(some_samples(), 0)
    before = snapshot(policy)
    result = policy.step([replace(sample, truncated=True) for sample in some_samples()], 1)
    assert not result.updated
    assert result.metrics["step/skipped_empty_total"] == 1
    assert snapshot(policy) == before


def test_a_step_without_any_advantage_changes_nothing_despite_weight_decay(open_policy):
    policy = open_policy(weight_decay=0.1)
    policy.step(some_samples(), 0)
    before = snapshot(policy)
    assert not policy.step([replace(sample, advantage=0.0) for sample in some_samples()], 1).updated
    assert snapshot(policy) == before


def poison_a_logprob(policy: TorchPolicy, sample: Sample) -> Sample:
    return replace(sample, sampler_logprobs=np.full_like(sample.sampler_logprobs, np.nan))


def poison_a_gradient(policy: TorchPolicy, sample: Sample) -> Sample:
    next(iter(policy._factors.values())).register_hook(lambda gradient: gradient * float("inf"))
    return sample


@pytest.mark.parametrize("poison", [poison_a_logprob, poison_a_gradient])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing_and_is_counted(open_policy, poison):
    policy = open_policy()
    policy.step(some_samples(), 0)
    before = snapshot(policy)
    first, *others = some_samples()
    result = policy.step([poison(policy, first), *others], 1)
    assert not result.updated
    assert result.metrics["step/skipped_nonfinite_total"] == 1
    assert np.isfinite(list(result.metrics.values())).all()
    assert snapshot(policy) == before


def test_ids_without_their_logprobs_are_refused(open_policy):
    short = replace(some_samples()[0], sampler_logprobs=np.zeros(50, np.float32))
    with pytest.raises(ValueError, match="50 log-probabilities"):
        open_policy().step([short], 0)


# --- exactness ----------------------------------------------------------------------------------


def test_six_steps_equal_three_a_restart_and_three(open_policy):
    learner = {"schedule": "cosine", "warmup_updates": 2, "updates": 8, "weight_decay": 0.01}
    straight, first, second = (open_policy(**learner) for _ in range(3))
    for update in range(6):
        straight.step(some_samples(seed=update), update)
    for update in range(3):
        first.step(some_samples(seed=update), update)
    second.load(first.factors())
    second.restore(safetensors.numpy.load(safetensors.numpy.save(first.state().result())))
    for update in range(3, 6):
        second.step(some_samples(seed=update), update)
    assert snapshot(second) == snapshot(straight)


def test_a_restart_without_the_optimizer_state_would_differ(open_policy):
    first, second = open_policy(), open_policy()
    first.step(some_samples(), 0)
    second.load(first.factors())
    for policy in (first, second):
        policy.step(some_samples(seed=1), 1)
    assert snapshot(first) != snapshot(second)


def test_a_dropped_step_can_be_taken_back(open_policy):
    policy = open_policy()
    policy.step(some_samples(), 0)
    before, factors, state = snapshot(policy), policy.factors(), policy.state().result()
    policy.step(some_samples(seed=1), 1)
    policy.load(factors)
    policy.restore(state)
    assert snapshot(policy) == before


def test_a_step_neither_uses_nor_moves_the_global_random_state(open_policy):
    first, second = open_policy(), open_policy()
    torch.manual_seed(1)
    first.step(some_samples(), 0)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second.step(some_samples(), 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert snapshot(first) == snapshot(second)


def test_every_metric_of_a_step_is_a_finite_number(open_policy):
    metrics = open_policy({"kl_beta": 0.1, "correction": "mask"}).step(some_samples(), 0).metrics
    assert np.isfinite(list(metrics.values())).all()
    expected = {"loss", "grad_norm", "learning_rate", "ratio", "kl", "kl_genesis", "entropy"}
    expected |= {
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/region_mean",
        "sampling/masked_frac",
    }
    expected |= {"perf/fwd_s", "perf/bwd_s", "perf/optimizer_s", "batch/trained_tokens_per_step"}
    assert expected <= metrics.keys()
