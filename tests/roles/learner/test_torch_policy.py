"""The trainable policy on a real two-layer Llama: its factors and its loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from protocol.errors import OperatorError
from roles.learner.policy import Policy, Sample
from roles.learner.torch_loss import StepTotals
from roles.learner.torch_policy import TorchPolicy
from roles.policy.compose import factors_digest
from tests.roles.learner.tiny_llama import (
    a_sample,
    a_spec,
    draw,
    gradient_of,
    on_policy,
    snapshot,
    some_samples,
    trained_factors,
)


def gradient(policy: TorchPolicy, samples: list[Sample]) -> torch.Tensor:
    counted, trained = policy._divide(samples)
    policy._accumulate(trained, StepTotals(sum(len(s.token_ids) for s in counted), len(counted)))
    return torch.cat([gradient_of(parameter).flatten() for parameter in policy._factors.values()])


def test_it_is_a_policy(open_policy):
    policy: Policy = open_policy()
    assert policy.step(some_samples(), 0).updated


# --- genesis and factors ------------------------------------------------------------------------


def test_genesis_is_the_same_bytes_for_the_same_seed_whatever_the_global_random_state(open_policy):
    policy = open_policy()
    torch.manual_seed(1)
    first = factors_digest(policy.genesis(7))
    torch.manual_seed(2)
    assert factors_digest(open_policy().genesis(7)) == first
    assert factors_digest(policy.genesis(8)) != first


def test_genesis_has_b_zero_and_peft_names_and_leaves_the_policy_alone(open_policy):
    policy = open_policy()
    before = snapshot(policy)
    genesis = policy.genesis(0)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in genesis
    assert len(genesis) == 2 * 7 * 2  # A and B of seven linear layers in two blocks; never the LM head
    assert all(tensor.any() == (".lora_A." in name) for name, tensor in genesis.items())
    assert snapshot(policy) == before


def test_a_new_policy_holds_the_genesis_of_its_run(model_dir):
    policy = TorchPolicy.open(model_dir, a_spec())
    assert factors_digest(policy.factors()) == factors_digest(policy.genesis(0))


def test_loaded_factors_come_back_bit_for_bit_and_are_copies(open_policy):
    policy = open_policy()
    factors = trained_factors(policy, seed=3)
    digest = factors_digest(factors)
    policy.load(factors)
    taken = policy.factors()
    assert factors_digest(taken) == digest
    next(iter(taken.values()))[:] = 0
    assert factors_digest(policy.factors()) == digest


@pytest.mark.parametrize("fault", ["nan", "missing", "none match", "shape", "extra"])
def test_a_faulty_adapter_is_refused_before_a_tensor_is_copied(open_policy, fault):
    policy = open_policy()
    before = snapshot(policy)
    factors = trained_factors(policy, seed=3)
    last = max(factors)
    if fault == "nan":
        factors[last][0, 0] = np.nan
    elif fault == "missing":
        del factors[last]
    elif fault == "none match":
        factors = {name.removeprefix("base_model.model."): tensor for name, tensor in factors.items()}
    elif fault == "shape":
        factors[last] = factors[last][:-1]
    else:
        factors["base_model.model.lm_head.lora_A.weight"] = factors[last]
    with pytest.raises(ValueError, match="not an adapter of this run"):
        policy.load(factors)
    assert snapshot(policy) == before


def test_factors_are_fp32_over_a_bfloat16_base(model_dir):
    spec = a_spec().model_copy(update={"model": a_spec().model.model_copy(update={"dtype": "bfloat16"})})
    policy = TorchPolicy.open(model_dir, spec)
    assert policy.step(some_samples(), 0).updated
    assert {tensor.dtype for tensor in policy.factors().values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("targets", [("no_such_layer",), ("q_proj", "no_such_layer")])
def test_target_modules_that_match_nothing_are_an_operator_error(model_dir, targets):
    spec = a_spec().model_copy(update={"lora": a_spec().lora.model_copy(update={"target_modules": targets})})
    with pytest.raises(OperatorError, match="no_such_layer"):
        TorchPolicy.open(model_dir, spec)


def test_a_directory_without_a_model_is_an_operator_error(tmp_path):
    with pytest.raises(OperatorError, match="not a causal language model"):
        TorchPolicy.open(tmp_path, a_spec())


# --- the loss on real data ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_importance_ratio_of_self_sampled_data_is_one(open_policy, temperature):
    policy = open_policy()
    samples = [draw(policy, [3 + seed, 4, 5], temperature, seed) for seed in range(6)]
    metrics = policy.step(samples, 0).metrics
    assert metrics["ratio_max_dev_on_policy"] < 1e-5
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_deviation_on_policy_is_absent_when_no_sample_is_on_policy(open_policy):
    assert "ratio_max_dev_on_policy" not in open_policy().step(some_samples(), 0).metrics


def test_a_rewarded_completion_becomes_likelier_and_a_punished_one_less_likely(open_policy):
    policy = open_policy()
    good, bad = (
        a_sample(np.random.default_rng(seed), length=4, advantage=a) for seed, a in ((1, 1.0), (2, -1.0))
    )
    before = [on_policy(policy, s).sampler_logprobs.sum() for s in (good, bad)]
    policy.step([on_policy(policy, good), on_policy(policy, bad)], 0)
    after = [on_policy(policy, s).sampler_logprobs.sum() for s in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"aggregation": "sequence", "ratio_level": "sequence"},
        {"aggregation": "constant", "aggregation_tokens": 9, "detached_weight": True},
        {"correction": "truncate", "kl_beta": 0.1, "entropy_coef": 0.01},
    ],
)
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(open_policy, loss):
    samples = some_samples(8)
    whole, halves, single = (
        gradient(open_policy(loss, micro_batch_tokens=tokens), samples) for tokens in (10_000, 40, 1)
    )
    assert whole.abs().max() > 1e-3
    assert torch.allclose(whole, halves, atol=1e-6, rtol=1e-5)
    assert torch.allclose(whole, single, atol=1e-6, rtol=1e-5)


def test_samples_without_advantage_are_not_forwarded_but_count_in_the_divisors(open_policy):
    policy = open_policy()
    samples = some_samples(4)
    silent = [replace(sample, advantage=0.0) for sample in some_samples(4, seed=1)]
    result = policy.step([*samples, *silent], 0)
    assert result.metrics["batch/trained_tokens_per_step"] == sum(len(s.token_ids) for s in samples)
    share = sum(len(s.token_ids) for s in samples) / sum(len(s.token_ids) for s in [*samples, *silent])
    assert torch.allclose(
        gradient(open_policy(), [*samples, *silent]), share * gradient(open_policy(), samples), atol=1e-6
    )


def test_samples_without_advantage_still_feel_the_kl(open_policy):
    silent = [replace(sample, advantage=0.0) for sample in some_samples(4)]
    result = open_policy({"kl_beta": 0.1}).step(silent, 0)
    assert result.updated
    assert result.metrics["kl_genesis"] > 0


def test_kl_to_genesis_is_zero_at_genesis(model_dir):
    policy = TorchPolicy.open(model_dir, a_spec({"kl_beta": 0.1}))
    assert policy.step(some_samples(), 0).metrics["kl_genesis"] == 0.0


def test_truncated_completions_leave_numerator_and_denominator(open_policy):
    policy = open_policy({"mask_truncated": True})
    rng = np.random.default_rng(0)
    ended = on_policy(policy, a_sample(rng, length=3, advantage=1.0))
    cut = on_policy(policy, a_sample(rng, length=5, advantage=-1.0, truncated=True))
    assert policy.step([ended, cut], 0).metrics["loss"] == pytest.approx(-1.0, abs=1e-6)
