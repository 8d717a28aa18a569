"""The exam: the exact probability that a policy answers held-out problems right, without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from protocol.runspec import RunSpec
from roles.learner.policy import Sample
from roles.learner.torch_adapter import causal_model, factor_parameters, open_adapter
from roles.learner.torch_logprobs import PaddedRows, score
from roles.policy.compose import Factors
from roles.tasks.prompts import PromptBuilder, Tokenizer
from roles.tasks.taskset import Row


class Exam:
    """Held-out problems whose one right answer is known as text."""

    def __init__(
        self, model_dir: Path, spec: RunSpec, tokenizer: Tokenizer, rows: Sequence[Row], eos: int
    ) -> None:
        """An answer is right if it is exactly the row's, and ``eos`` follows."""
        prompts = PromptBuilder(tokenizer, spec.tasks)
        answers = [[*tokenizer.encode(row.answer, add_special_tokens=False), eos] for row in rows]
        samples = [
            Sample(
                prompt_token_ids=prompts.token_ids(row.prompt),
                token_ids=np.array(answer, np.int32),
                sampler_logprobs=np.zeros(len(answer), np.float32),
                advantage=0.0,
                truncated=False,
                temperature=1.0,
            )
            for row, answer in zip(rows, answers, strict=True)
        ]
        device = torch.device("cpu")
        model = open_adapter(model_dir, spec.model, spec.lora, device)
        self._model = causal_model(model)
        self._factors = factor_parameters(model)
        self._rows = PaddedRows.of(samples, device)
        self._count = len(samples)

    def reward(self, policy: Factors) -> float:
        """Mean probability of the right answer at temperature 1."""
        with torch.no_grad():
            for name, parameter in self._factors.items():
                parameter.copy_(torch.from_numpy(np.array(policy[name])))
            logprobs = score(self._model, self._rows).logprobs.double()
            summed = torch.zeros(self._count, dtype=torch.float64).index_add(0, self._rows.rows, logprobs)
        return float(summed.exp().mean())
