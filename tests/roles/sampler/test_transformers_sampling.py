"""Sampling functions: truncation against a slow reference, and draws that follow the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protocol.messages import SamplingParams
from roles.sampler.fake_engine import truncated_logprobs
from roles.sampler.transformers_sampling import draw
from roles.torch_sampling import RowParams, sampling_logits

CPU = torch.device("cpu")


def params_of(*rows: SamplingParams) -> RowParams:
    return RowParams.of(rows, CPU)


def sampling_logprobs(logits: torch.Tensor, rows: RowParams) -> torch.Tensor:
    return torch.log_softmax(sampling_logits(logits, rows), -1)


def params(**changes) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **changes)


def reference(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probabilities by the book: one token at a time, in fp64."""
    weights = np.exp(logits.astype(np.float64) / p.temperature)
    probabilities = weights / weights.sum()
    ranked = sorted(range(len(logits)), key=lambda token: -probabilities[token])
    kept = [token for token in ranked if probabilities[token] >= p.min_p * probabilities[ranked[0]]]
    kept = kept[: p.top_k or len(kept)]
    total, mass, nucleus = probabilities[kept].sum(), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += probabilities[token]
        if mass / total >= p.top_p:
            break
    result = np.zeros(len(logits))
    result[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    return result


CASES = [
    params(),
    params(temperature=0.7),
    params(temperature=1.3),
    params(top_k=5),
    params(top_p=0.6),
    params(min_p=0.2),
    params(temperature=0.8, top_k=12, top_p=0.8, min_p=0.02),
    params(top_k=1000),
    params(top_p=1e-6),
]


@pytest.mark.parametrize("case", CASES, ids=lambda p: str(p.model_dump(exclude_defaults=True)))
def test_logprobs_are_those_of_the_renormalised_distribution(case):
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32) * 2
    expected = reference(logits, case)
    ours = sampling_logprobs(torch.from_numpy(logits)[None], params_of(case))[0].exp().numpy()
    fakes = np.exp(truncated_logprobs(logits.astype(np.float64), case))
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    np.testing.assert_allclose(fakes, expected, atol=1e-9)


def test_a_row_is_not_touched_by_the_truncation_of_its_neighbours():
    logits = torch.randn(len(CASES), 50, generator=torch.Generator().manual_seed(1)) * 3
    together = sampling_logprobs(logits, params_of(*CASES))
    for row, case in enumerate(CASES):
        alone = sampling_logprobs(logits[row : row + 1], params_of(case))
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-6, rtol=0)


def test_half_precision_logits_are_normalised_in_fp32():
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert sampling_logits(logits, params_of(params(), params())).dtype == torch.float32
    tokens, logprobs = draw(sampling_logits(logits, params_of(params(), params())), torch.tensor([0.1, 0.9]))
    expected = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_zero_probability_is_never_drawn(uniform):
    probabilities = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0]])
    tokens, logprobs = draw(probabilities.log(), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.item() == (2 if uniform < 0.3 else 4)
    assert logprobs.item() == pytest.approx(np.log(0.3 if uniform < 0.3 else 0.7))


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    probabilities = torch.tensor([[0.25, 0.5, 0.25]]).expand(4, 3)
    tokens, _ = draw(probabilities.log(), torch.tensor([0.1, 0.3, 0.7, 0.8], dtype=torch.float64))
    assert tokens.tolist() == [0, 1, 1, 2]


def test_a_row_that_is_not_a_number_gives_a_logprob_that_is_none_and_a_valid_token():
    tokens, logprobs = draw(torch.full((2, 5), torch.nan), torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 5)).all()
    assert logprobs.isnan().all()


@pytest.mark.parametrize("vocab", [3, 256, 1000])
def test_a_draw_by_blocks_is_a_search_in_the_whole_cumulative_distribution(vocab):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, vocab, generator=generator) * 4
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(logits, uniforms)
    cdf = torch.softmax(logits.double(), -1).cumsum(-1)
    slack = 1e-6
    below = torch.where(tokens > 0, cdf.gather(-1, (tokens - 1).clamp(min=0)[:, None])[:, 0], 0)
    assert (below <= uniforms + slack).all()
    assert (cdf.gather(-1, tokens[:, None])[:, 0] >= uniforms - slack).all()
    expected = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


def test_drawn_frequencies_follow_a_truncated_distribution():
    """Pearson's chi-square over 20000 draws of top-p 0.9 at temperature 1.3; beyond 1 in 10^5 fails."""
    case = params(temperature=1.3, top_p=0.9)
    logits = torch.randn(600, generator=torch.Generator().manual_seed(4)) * 3
    expected = reference(logits.numpy(), case) * 20000
    uniforms = torch.rand(20000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    tokens, _ = draw(sampling_logits(logits[None], params_of(case)).expand(20000, -1), uniforms)
    counts = np.bincount(tokens.numpy(), minlength=600)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    cells = [
        *zip(counts[common], expected[common], strict=True),
        (counts[~common].sum(), expected[~common].sum()),
    ]
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells if wanted)
    freedom = len(cells) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
