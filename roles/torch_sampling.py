"""The distribution to sample from, as pure functions on logits: temperature and truncation.

Samplers draw from it, verifiers ask whether somebody did. Legend: N rows, V tokens of the vocabulary.
Order of operations, as in vLLM: temperature, then min-p and top-k, then top-p on what they left.
Log-probabilities are those of the resulting distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of N rows as columns [N, 1]; None where no row needs them."""

    temperature: Tensor | None
    min_p: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], device: torch.device) -> RowParams:
        """Columns for ``rows``; what is neutral for every row is left out."""

        def column(values: list[float], neutral: float, dtype: torch.dtype) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype).unsqueeze(1).to(device)

        return cls(
            temperature=column([p.temperature for p in rows], 1.0, torch.float32),
            min_p=column([p.min_p for p in rows], 0.0, torch.float32),
            top_k=column([p.top_k for p in rows], 0, torch.int64),
            top_p=column([p.top_p for p in rows], 1.0, torch.float32),
        )


def sampling_logits(logits_NV: Tensor, params: RowParams) -> Tensor:
    """Logits [N, V] in fp32 whose softmax is the distribution to sample from; -inf outside the truncation."""
    logits_NV = logits_NV.float()
    if params.temperature is not None:
        logits_NV = logits_NV / params.temperature
    if params.min_p is None and params.top_k is None and params.top_p is None:
        return logits_NV
    keep_NV = torch.ones_like(logits_NV, dtype=torch.bool)
    if params.min_p is not None:
        keep_NV &= logits_NV >= logits_NV.amax(-1, keepdim=True) + params.min_p.log()
    if params.top_k is not None:
        keep_NV &= _in_top_k(logits_NV, params.top_k)
    if params.top_p is not None:
        keep_NV &= _in_top_p(logits_NV.masked_fill(~keep_NV, -torch.inf), params.top_p)
    return logits_NV.masked_fill(~keep_NV, -torch.inf)


def _in_top_k(logits_NV: Tensor, top_k_N1: Tensor) -> Tensor:
    """The k most probable tokens and all that tie with the last of them; 0 means all."""
    vocab = logits_NV.shape[-1]
    k_N1 = torch.where(top_k_N1 == 0, vocab, top_k_N1).clamp(max=vocab)
    sorted_NV = logits_NV.sort(dim=-1, descending=True).values
    return logits_NV >= sorted_NV.gather(-1, k_N1 - 1)


def _in_top_p(logits_NV: Tensor, top_p_N1: Tensor) -> Tensor:
    """The smallest set of most probable tokens whose mass reaches p (Holtzman et al. 2019)."""
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    mass_NV = torch.softmax(sorted_NV, dim=-1)
    above_NV = mass_NV.cumsum(-1, dtype=widest(logits_NV.device)) - mass_NV
    # A row with p = 1 keeps its whole tail even where rounding brings the sum to 1 early.
    keep_NV = (above_NV < top_p_N1) | (top_p_N1 >= 1)
    keep_NV[:, 0] = True
    return torch.zeros_like(keep_NV).scatter(-1, order_NV, keep_NV)


def sampling_logprobs(logits_NV: Tensor, params: RowParams) -> Tensor:
    """Log-probabilities [N, V] in fp32 of the distribution to sample from; -inf outside the truncation."""
    return torch.log_softmax(sampling_logits(logits_NV, params), dim=-1)


def widest(device: torch.device) -> torch.dtype:
    """The widest float that a device sums in."""
    return torch.float32 if device.type == "mps" else torch.float64
