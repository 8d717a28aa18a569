"""A recomputation without a model, for simulations and tests: made-up distributions, real facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from protocol.arrays import IntArray
from protocol.messages import SamplingParams
from roles.policy.compose import Factors, factors_digest
from roles.verifier.audit_facts import Numbers, TokenFacts
from roles.verifier.torch_facts import score_tokens
from roles.verifier.torch_recompute import split

NextToken = Callable[[str, bytes, SamplingParams], Numbers]
"""From a policy's digest, a prompt's bytes and parameters to log-probabilities [V], at every position."""


class FakeRecompute:
    """Implements ``roles.verifier.auditor.Recompute``; ``calls`` counts forward passes."""

    def __init__(self, next_token: NextToken, eos_ids: Sequence[int] = (2,)) -> None:
        self._next_token = next_token
        self._eos_ids = torch.tensor(sorted(eos_ids))
        self.calls = 0

    def facts(
        self,
        policy: str,  # noqa: ARG002 the factors tell all
        factors: Factors,
        prompt: IntArray,
        completions: Sequence[IntArray],
        params: SamplingParams,
    ) -> list[TokenFacts]:
        """Facts of each completion, in order."""
        self.calls += 1
        logprobs_V = torch.from_numpy(self._next_token(factors_digest(factors), prompt.tobytes(), params))
        targets_N = torch.from_numpy(np.concatenate(completions).astype(np.int64))
        scored = score_tokens(logprobs_V.float().expand(len(targets_N), -1), targets_N, self._eos_ids)
        return split(scored, [len(completion) for completion in completions])
