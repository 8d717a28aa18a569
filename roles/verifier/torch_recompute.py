"""Recomputes what a policy gives for completions, in one forward pass a few rows at a time.

    prompt + completions ─▶ model under the claimed policy ─▶ hidden states ─▶ head, in chunks ─▶ facts

Legend: G completions of one prompt, W padded width, N completion tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor

from protocol.arrays import IntArray
from protocol.messages import SamplingParams
from protocol.runspec import LoraSpec, ModelSpec
from roles.base_model import evaluated, load_base, with_adapter
from roles.policy.compose import Factors
from roles.torch_logit_head import logit_head
from roles.torch_sampling import RowParams, sampling_logprobs
from roles.verifier.audit_facts import TokenFacts
from roles.verifier.torch_facts import Scored, score_tokens

ROW_TOKENS_MAX = 4096
"""Tokens of one forward pass, padding included."""
LOGITS_MAX = 1 << 23
"""Logits that exist at once; a dozen arrays of that size live while they are scored."""


class Recomputer:
    """A base model with one LoRA slot. Not for concurrent use; heavy: call it off the loop."""

    def __init__(self, model: PeftModel, eos_ids: Sequence[int], device: torch.device) -> None:
        self._model: Any = _causal(model)
        self._head = logit_head(self._model)
        self._device = device
        self._eos_ids = torch.tensor(sorted(eos_ids), device=device)
        self._factors = {
            name.replace(".default.weight", ".weight"): parameter
            for name, parameter in model.named_parameters()
            if ".lora_" in name
        }
        self._held: str | None = None
        self.vocabulary = int(self._model.get_output_embeddings().weight.shape[0])

    @classmethod
    def open(
        cls, model_dir: Path, model: ModelSpec, lora: LoraSpec, eos_ids: Sequence[int], device: str = "cpu"
    ) -> Recomputer:
        """Load a base model. Raises OperatorError if it, or this LoRA on it, cannot be had."""
        base = load_base(model_dir, torch.device(device), dtype=model.dtype, bits=model.bits)
        targets = lora.target_modules if lora.target_modules == "all-linear" else list(lora.target_modules)
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # declared int, but PEFT only divides it
            use_rslora=lora.rslora,
            target_modules=targets,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        adapted = evaluated(with_adapter(base, config)).requires_grad_(requires_grad=False)
        return cls(adapted, eos_ids, torch.device(device))

    def facts(
        self,
        policy: str,
        factors: Factors,
        prompt: IntArray,
        completions: Sequence[IntArray],
        params: SamplingParams,
    ) -> list[TokenFacts]:
        """What ``policy`` gives for each completion of ``prompt`` at ``params``.

        ``factors`` are the policy's; a name stands for the same factors for ever.
        """
        self._hold(policy, factors)
        found: list[TokenFacts] = []
        longest = len(prompt) + max(len(completion) for completion in completions)
        rows = max(1, ROW_TOKENS_MAX // longest)
        with torch.inference_mode():
            for start in range(0, len(completions), rows):
                found += self._some(prompt, completions[start : start + rows], params)
        return found

    def _hold(self, policy: str, factors: Factors) -> None:
        if self._held != policy:
            self._held = None
            with torch.no_grad():
                for name, parameter in self._factors.items():
                    parameter.copy_(torch.from_numpy(np.array(factors[name], np.float32)))
            self._held = policy

    def _some(
        self, prompt: IntArray, completions: Sequence[IntArray], params: SamplingParams
    ) -> list[TokenFacts]:
        lengths = [len(completion) for completion in completions]
        width = len(prompt) + max(lengths)
        ids_GW = np.zeros((len(completions), width), np.int64)
        mask_GW = np.zeros((len(completions), width), np.int64)
        for row, completion in enumerate(completions):
            ids_GW[row, : len(prompt)] = prompt
            ids_GW[row, len(prompt) : len(prompt) + len(completion)] = completion
            mask_GW[row, : len(prompt) + len(completion)] = 1
        ran = self._model.base_model(
            input_ids=torch.from_numpy(ids_GW).to(self._device),
            attention_mask=torch.from_numpy(mask_GW).to(self._device),
            use_cache=False,
        )
        first = len(prompt) - 1
        hidden_NH = torch.cat(
            [ran.last_hidden_state[row, first : first + n] for row, n in enumerate(lengths)]
        )
        targets_N = torch.from_numpy(np.concatenate(completions).astype(np.int64)).to(self._device)
        return split(self._score(hidden_NH, targets_N, params), lengths)

    def _score(self, hidden_NH: Tensor, targets_N: Tensor, params: SamplingParams) -> Scored:
        size = max(1, LOGITS_MAX // self.vocabulary)
        parts = []
        for start in range(0, len(targets_N), size):
            hidden, targets = hidden_NH[start : start + size], targets_N[start : start + size]
            row_params = RowParams.of([params] * len(targets), self._device)
            logprobs_NV = sampling_logprobs(self._head(hidden), row_params)
            parts.append(score_tokens(logprobs_NV, targets, self._eos_ids))
        return Scored.joined(parts)


def _causal(model: Any) -> Any:
    """The transformers model inside, whose layers carry the factors."""
    return model.get_base_model()


def split(scored: Scored, lengths: Sequence[int]) -> list[TokenFacts]:
    """Facts of completions that were scored one after the other."""
    columns = scored.columns.double().cpu().numpy()
    sampling = scored.sampling.double().cpu().numpy()
    endings = scored.endings.double().cpu().numpy()
    facts, start = [], 0
    for length in lengths:
        some = slice(start, start + length)
        own, entropy, varentropy, above, level, below = columns[:, some]
        facts.append(
            TokenFacts(own, entropy, varentropy, above, level, below, sampling[:, some], endings[:, some])
        )
        start += length
    return facts
