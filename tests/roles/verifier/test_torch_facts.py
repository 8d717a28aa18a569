"""Facts of tokens: every likelihood ratio has a mean of at most one under honest sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from protocol.messages import SamplingParams
from roles.torch_sampling import RowParams, sampling_logprobs
from roles.verifier.audit_facts import ENDINGS, SAMPLING
from roles.verifier.torch_facts import IMPOSSIBLE, score_tokens

VOCABULARY = 300
EOS = torch.tensor([2, 7])


def every_token(sharpness: float, **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One random distribution, as often as there are tokens, and every token once."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)) * sharpness
    rows = RowParams.of([SamplingParams(max_new_tokens=1, **params)] * VOCABULARY, torch.device("cpu"))
    return sampling_logprobs(logits.repeat(VOCABULARY, 1), rows), torch.arange(VOCABULARY)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"top_k": 40}, {"top_p": 0.8}])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 6.0])
def test_ratios_are_fair_bets(sharpness: float, params: dict[str, float]):
    logprobs_NV, targets = every_token(sharpness, **params)
    scored = score_tokens(logprobs_NV, targets, EOS)
    p = logprobs_NV[0].exp().double()
    possible = p > 0
    for names, ratios in ((SAMPLING, scored.sampling), (ENDINGS, scored.endings)):
        assert len(ratios) == len(names)
        for name, ratio in zip(names, ratios, strict=True):
            mean = float((p[possible] * ratio[possible].double().exp()).sum())
            assert mean <= 1 + 1e-4, name


def test_what_a_liar_samples_is_evidence_for_what_it_does():
    logprobs_NV, targets = every_token(2.0)
    scored = score_tokens(logprobs_NV, targets, EOS)
    p = logprobs_NV[0].exp().double()
    hot = torch.softmax(logprobs_NV[0].double() / 1.33, 0)
    gains = {name: float((hot * r.double()).sum()) for name, r in zip(SAMPLING, scored.sampling, strict=True)}
    assert max(gains, key=lambda name: gains[name]) == "temperature x1.33"
    greedy = scored.sampling[SAMPLING.index("top-k 1")]
    assert int(greedy.argmax()) == int(p.argmax())
    assert float(greedy.max()) == pytest.approx(-float(logprobs_NV.max()), abs=0.02)


def test_entropy_rank_and_place_are_those_of_the_distribution():
    logprobs_NV, targets = every_token(1.5)
    own, entropy, varentropy, above, level, below = score_tokens(logprobs_NV, targets, EOS).columns.numpy()
    p = logprobs_NV[0].exp().double().numpy()
    assert own == pytest.approx(np.log(p), rel=1e-5)
    assert entropy[0] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-5)
    assert varentropy[0] == pytest.approx((p * (np.log(p) + entropy[0]) ** 2).sum(), rel=1e-4)
    assert above[p.argmax()] == 0
    assert above[p.argmin()] == pytest.approx(1 - p.min(), abs=1e-5)
    assert level == pytest.approx(p, rel=1e-4, abs=1e-7)
    assert below == pytest.approx(np.cumsum(p) - p, abs=1e-5)


def test_a_token_outside_the_truncation_is_improbable_and_not_minus_infinity():
    logprobs_NV, targets = every_token(1.0, top_k=5)
    scored = score_tokens(logprobs_NV, targets, EOS)
    outside = logprobs_NV[0].isneginf()
    assert set(scored.columns[0][outside].tolist()) == {IMPOSSIBLE}
    assert torch.isfinite(scored.sampling).all()
    assert torch.isfinite(scored.endings).all()
