"""What a learner makes of tokens that somebody else sampled: its own layers, packed rows and head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.arrays import IntArray
from protocol.messages import SamplingParams
from protocol.runspec import LoraSpec, ModelSpec
from roles.learner.policy import Sample
from roles.learner.torch_adapter import causal_model, factor_parameters, open_adapter
from roles.learner.torch_logprobs import hidden_states, score
from roles.learner.torch_rows import Row, Rows
from roles.policy.compose import Factors
from roles.torch_logit_head import logit_head
from roles.torch_sampling import RowParams, sampling_logprobs

TOKENS_MAX = 4096
"""Of a packed row."""


class LearnerScorer:
    """The model of a learner, which trains nothing."""

    def __init__(self, model_dir: Path, model: ModelSpec, lora: LoraSpec, device: str = "cpu") -> None:
        """Open it as a learner does. Raises OperatorError like one."""
        adapted = open_adapter(model_dir, model, lora, torch.device(device))
        self._device = torch.device(device)
        self._causal = causal_model(adapted)
        self._factors = factor_parameters(adapted)
        self._rows = Rows(self._causal, self._device)

    def load(self, factors: Factors) -> None:
        """Score under these factors from now on."""
        with torch.no_grad():
            for name, parameter in self._factors.items():
                parameter.copy_(torch.from_numpy(factors[name]))

    def logprobs(
        self, prompt: IntArray, completions: Sequence[IntArray], params: SamplingParams
    ) -> list[NDArray[np.float32]]:
        """Log-probabilities [T] of each completion of ``prompt``.

        Of a truncated distribution they are over what the truncation leaves, as a sampler's are; a token
        outside has -inf. A learner itself scores every token without truncation.
        """
        samples = [
            Sample(prompt, ids, np.zeros(len(ids), np.float32), 0.0, truncated=False, temperature=t)
            for t, ids in ((params.temperature, np.asarray(ids)) for ids in completions)
        ]
        found: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad():
            for indices, row in self._rows.of(samples, TOKENS_MAX):
                lengths = [len(completions[index]) for index in indices]
                parts = self._scored(row, params).cpu().split(lengths)
                found |= {index: part.numpy() for index, part in zip(indices, parts, strict=True)}
        return [found[index] for index in range(len(completions))]

    def _scored(self, row: Row, params: SamplingParams) -> Tensor:
        if params.top_p == 1 and params.top_k == 0 and params.min_p == 0:
            return score(self._causal, row).logprobs
        logits = logit_head(self._causal)(hidden_states(self._causal, row))
        logprobs = sampling_logprobs(logits, RowParams.of([params], self._device))
        return logprobs.gather(-1, row.targets[:, None])[:, 0]
