"""Every engine draws from the distribution that it reports, truncation included."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import pytest

from protocol.messages import SamplingParams
from tests.engine_rigs import Rig, a_request, some_factors

GROUPS, ROWS = 20, 100
DRAWS = GROUPS * ROWS
FP32 = 1e-4

CASES = [
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=1, temperature=1.3, top_p=0.9),
    SamplingParams(max_new_tokens=1, temperature=0.7, top_k=12, min_p=0.02),
]


@pytest.fixture(params=["fake", "transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
async def rig(request, make_rig) -> AsyncIterator[Rig]:
    """A rig whose engine serves policy v1."""
    rig = await make_rig(request.param)
    await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
    yield rig
    await rig.engine.close()


@pytest.mark.parametrize("params", CASES, ids=["plain", "top-p", "top-k and min-p"])
async def test_tokens_come_as_often_as_their_log_probabilities_say(rig, params):
    """Pearson's chi-square over the first token of 2000 completions; beyond 1 in 10^5 fails."""
    requests = [a_request(count=ROWS, seed=seed, params=params) for seed in range(GROUPS)]
    groups = await asyncio.gather(*(rig.engine.sample(request) for request in requests))
    counts: Counter[int] = Counter()
    reported: dict[int, float] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        token, logprob = int(rollout.token_ids[0]), float(rollout.sampler_logprobs[0])
        assert abs(reported.setdefault(token, logprob) - logprob) < FP32, "one distribution for all"
        counts[token] += 1
    assert counts.total() == DRAWS
    probabilities = {token: float(np.exp(logprob)) for token, logprob in reported.items()}
    assert 0.98 < sum(probabilities.values()) < 1 + FP32, "what truncation leaves adds up to 1"
    common = [token for token, probability in probabilities.items() if probability * DRAWS >= 5]
    cells = [(counts[token], probabilities[token] * DRAWS) for token in common]
    seen, expected = map(sum, zip(*cells, strict=True))
    if DRAWS - expected >= 5:
        cells.append((DRAWS - seen, DRAWS - expected))
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    assert freedom >= 3, "a distribution worth the name"
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
