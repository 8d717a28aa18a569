"""Loss and gradient are the same however a step is cut into rows, in whatever order its groups come."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from roles.learner.policy import Sample
from roles.learner.torch_head import Head, chunked_scores
from roles.learner.torch_logprobs import PaddedRows, score, token_scores
from roles.learner.torch_loss import StepTotals
from roles.learner.torch_policy import TorchPolicy
from roles.learner.torch_rows import Rows
from tests.roles.learner.tiny_llama import VOCABULARY, a_sample, a_spec, trained_factors

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
}
LOSSES: list[dict[str, Any]] = [
    {},
    {"kl_beta": 0.1, "entropy_coef": 0.01, "aggregation": "sequence", "ratio_level": "sequence"},
]


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    directory: Path = tmp_path_factory.mktemp(request.param)
    MODELS[request.param]().save_pretrained(directory)
    return directory


def groups(seed: int) -> list[list[Sample]]:
    """Groups of one prompt each: prompts and completions of one token among them."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt in (1, 3, 6):
        ids = rng.integers(3, VOCABULARY, prompt).astype(np.int32)
        lengths = [1, *rng.integers(2, 9, 3)]
        found.append([a_sample(rng, length=int(n), prompt_token_ids=ids) for n in lengths])
    return found


def gradient(policy: TorchPolicy, samples: list[Sample]) -> tuple[float, np.ndarray]:
    """Loss and gradient of a step, without making it."""
    _, trained = policy._divide(samples)
    record = policy._accumulate(trained, StepTotals(sum(len(s.token_ids) for s in trained), len(trained)))
    parts = [factor.grad.numpy().ravel() for factor in policy._factors.values() if factor.grad is not None]
    policy._optimizer.zero_gradients()
    return record.loss, np.concatenate(parts)


@functools.cache
def three_policies(model_dir: Path, loss: str) -> tuple[TorchPolicy, TorchPolicy, TorchPolicy]:
    """Policies of the same factors: two that pack rows, one that pads them."""
    whole, cut, padded = (TorchPolicy.open(model_dir, a_spec(json.loads(loss))) for _ in range(3))
    padded._rows.packed = False
    assert (whole._rows.packed, cut._rows.packed) == (True, True)
    for policy in (whole, cut, padded):
        policy.load(trained_factors(whole))
    return whole, cut, padded


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 99), budget=st.integers(1, 80), order=st.randoms(use_true_random=False))
def test_any_cut_and_any_order_give_the_same_gradient(model_dir, loss, seed, budget, order):
    whole, cut, padded = three_policies(model_dir, json.dumps(loss))
    for policy in (cut, padded):
        policy._spec = a_spec(loss, micro_batch_tokens=budget)
    samples = [sample for group in groups(seed) for sample in group]
    expected = gradient(whole, samples)
    order.shuffle(samples)
    for policy in (cut, padded):
        found = gradient(policy, samples)
        assert found[0] == pytest.approx(expected[0], abs=1e-5)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-5)


def test_a_prompt_goes_through_the_model_once(model_dir):
    policy = TorchPolicy.open(model_dir, a_spec())
    group = groups(0)[2]
    ((_, row),) = policy._rows.of(group, 1000)
    assert row.tokens == 6 + sum(len(sample.token_ids) - 1 for sample in group)


def test_samples_of_one_prompt_at_other_temperatures_share_it(model_dir):
    policy = TorchPolicy.open(model_dir, a_spec())
    policy.load(trained_factors(policy))
    warm, cold = (replace(groups(0)[2][1], temperature=t) for t in (1.5, 0.7))
    ((_, row),) = policy._rows.of([warm, cold], 1000)
    packed = score(policy._causal, row).logprobs
    alone = [score(policy._causal, PaddedRows.of([s], torch.device("cpu"))).logprobs for s in (warm, cold)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_a_model_with_a_sliding_window_is_padded():
    config = Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert not Rows(Qwen3ForCausalLM(config).eval(), torch.device("cpu")).packed


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize(("factor", "softcap"), [(1.0, None), (0.5, 3.0)])
def test_chunks_bound_memory_and_change_nothing(factor, softcap):
    tokens, hidden, vocabulary, chunk = 40, 8, 1000, 10
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocabulary, hidden, generator=generator)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    temperatures = torch.rand(tokens, generator=generator) + 0.5
    upstream = torch.randn(tokens, generator=generator)
    plain, chunked = states.clone().requires_grad_(), states.clone().requires_grad_()
    logits = factor * plain @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = token_scores(logits, targets, temperatures)
    expected.logprobs.backward(upstream)
    with Largest() as largest:
        head = Head(weight, factor, softcap)
        scores = chunked_scores(chunked, head, targets, temperatures, chunk * vocabulary)
        scores.logprobs.backward(upstream)
    assert largest.numel <= chunk * vocabulary
    torch.testing.assert_close(scores.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chunked.grad, plain.grad, rtol=1e-4, atol=1e-5)
