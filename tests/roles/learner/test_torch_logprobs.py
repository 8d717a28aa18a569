"""Log-probabilities of completion tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)

from roles.learner.policy import Sample
from roles.learner.torch_logprobs import PaddedRows, head_deviation, score, token_scores
from tests.roles.learner.tiny_llama import EOS, some_samples

CPU = torch.device("cpu")


@pytest.fixture
def model(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir)


def sample_of(prompt: list[int], completion: list[int], temperature: float = 1.0) -> Sample:
    zeros = np.zeros(len(completion), np.float32)
    return Sample(
        np.array(prompt), np.array(completion), zeros, 1.0, truncated=False, temperature=temperature
    )


def test_logprobs_are_those_of_the_tempered_distribution():
    logits, targets = torch.tensor([[2.0, 0.0, -2.0]] * 3), torch.arange(3)
    tempered = token_scores(logits, targets, torch.full((3,), 0.5)).logprobs
    assert tempered.tolist() == pytest.approx([-0.0184793, -4.0184793, -8.0184793], abs=1e-6)
    plain = token_scores(logits, targets, torch.ones(3)).logprobs
    assert plain.tolist() == pytest.approx([-0.1429316, -2.1429316, -4.1429316], abs=1e-6)


def test_entropy_of_a_flat_distribution_is_log_of_its_size():
    assert token_scores(torch.zeros(1, 8), torch.tensor([0]), torch.ones(1)).entropy.item() == pytest.approx(
        np.log(8)
    )


def test_masks_come_from_lengths_although_the_padding_id_is_eos():
    rows = PaddedRows.of([sample_of([EOS, 9], [5, 6, 2]), sample_of([4, 9], [7, 2])], CPU)
    assert rows.targets.tolist() == [5, 6, 2, 7, 2]
    assert rows.rows.tolist() == [0, 0, 0, 1, 1]
    assert rows.attention.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_a_sample_without_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt"):
        PaddedRows.of([sample_of([], [5])], CPU)


def test_padding_changes_no_logprob(model):
    samples = some_samples()
    with torch.no_grad():
        together = score(model, PaddedRows.of(samples, CPU))
        alone = [score(model, PaddedRows.of([sample], CPU)) for sample in samples]
    assert torch.allclose(together.logprobs, torch.cat([one.logprobs for one in alone]), atol=1e-5)
    assert torch.allclose(together.entropy, torch.cat([one.entropy for one in alone]), atol=1e-5)


def test_scores_equal_the_log_softmax_of_full_logits(model):
    prompt, completion = [3, 4, 5], [6, 7, 2]
    with torch.no_grad():
        scores = score(model, PaddedRows.of([sample_of(prompt, completion, 0.7)], CPU))
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, 2:5]
    expected = torch.log_softmax(logits / 0.7, -1)
    assert torch.allclose(scores.logprobs, expected[range(3), completion], atol=1e-6)
    assert torch.allclose(scores.entropy, -(expected.exp() * expected).sum(-1), atol=1e-6)


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_chunks_of_the_lm_head_change_neither_values_nor_gradients(model, entropy_gradient):
    rows = PaddedRows.of(some_samples(), CPU)
    results = []
    for logits_max in (1 << 25, 32 * 3):
        model.zero_grad()
        scores = score(model, rows, entropy_gradient=entropy_gradient, logits_max=logits_max)
        (scores.logprobs.sum() + (scores.entropy.sum() if entropy_gradient else 0)).backward()
        results.append((scores, model.model.layers[0].mlp.up_proj.weight.grad.clone()))
    (whole, whole_grad), (cut, cut_grad) = results
    assert whole.entropy.requires_grad == entropy_gradient
    assert torch.allclose(whole.logprobs, cut.logprobs, atol=1e-6)
    assert torch.allclose(whole.entropy, cut.entropy, atol=1e-6)
    assert torch.allclose(whole_grad, cut_grad, atol=1e-4, rtol=1e-5)


def test_no_more_logits_than_allowed_exist_at_once(model):
    widths = []
    model.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.numel()))
    scores = score(model, PaddedRows.of(some_samples(), CPU), logits_max=32 * 4)
    scores.logprobs.sum().backward()
    assert max(widths) <= 32 * 4
    assert sum(widths) == 2 * 32 * scores.logprobs.numel()  # once forward, once more for the gradient


SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}


def test_soft_capping_and_logit_scale_of_the_config_are_followed():
    gemma = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=3.0)).eval()
    cohere = CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)).eval()
    for model in (gemma, cohere):
        assert head_deviation(model, range(8)) < 1e-5


def test_a_head_that_does_something_else_is_noticed(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output * args[0].dim())
    assert head_deviation(model, range(8)) > 0.1
