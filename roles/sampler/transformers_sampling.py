"""Sampling as pure functions on logits: temperature, truncation, and one draw per row.

Legend: N rows, V tokens of the vocabulary. Order of operations, as in vLLM: temperature, then min-p
and top-k, then top-p on what they left. Log-probabilities are those of the resulting distribution.

A vocabulary is wide and a step samples once from each row, so the full log-softmax is never written down:
one pass gives exp(logit - max), sums of blocks find the block that a draw falls into, and only that block is
summed token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from protocol.messages import SamplingParams

BLOCK = 256
"""Tokens that are summed together in a draw: near the square root of a large vocabulary."""


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
    above_NV = mass_NV.cumsum(-1, dtype=_widest(logits_NV.device)) - mass_NV
    # A row with p = 1 keeps its whole tail even where rounding brings the sum to 1 early.
    keep_NV = (above_NV < top_p_N1) | (top_p_N1 >= 1)
    keep_NV[:, 0] = True
    return torch.zeros_like(keep_NV).scatter(-1, order_NV, keep_NV)


def draw(logits_NV: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits) by inverse CDF: tokens [N] and their log-probabilities [N] in fp32.

    ``uniforms_N`` lie in [0, 1). A token of zero probability is never drawn; where the logits are NaN, so is
    the log-probability returned.
    """
    rows, vocab = logits_NV.shape
    wide = _widest(logits_NV.device)
    top_N1 = logits_NV.amax(-1, keepdim=True)
    weights_NV = (logits_NV - top_N1).exp_()
    if vocab % BLOCK:
        weights_NV = pad(weights_NV, (0, BLOCK - vocab % BLOCK))
    blocks_NBW = weights_NV.view(rows, -1, BLOCK)
    cdf_NB = blocks_NBW.sum(-1).cumsum(-1, dtype=wide)
    total_N1 = cdf_NB[:, -1:].contiguous()
    target_N1 = uniforms_N.to(wide).unsqueeze(1) * total_N1
    block_N1 = _first_above(cdf_NB, target_N1)
    before_N1 = torch.where(block_N1 > 0, cdf_NB.gather(-1, (block_N1 - 1).clamp(min=0)), 0)
    chosen_NW = blocks_NBW.gather(1, block_N1.unsqueeze(-1).expand(-1, 1, BLOCK)).squeeze(1)
    within_N1 = _first_above(chosen_NW.cumsum(-1, dtype=wide), target_N1 - before_N1)
    tokens_N1 = (block_N1 * BLOCK + within_N1).clamp(max=vocab - 1)
    picked_N1 = logits_NV.gather(-1, tokens_N1)
    # A parallel sum on an accelerator need not be monotone to the last bit.
    impossible_N1 = torch.isneginf(picked_N1)
    if bool(impossible_N1.any()):
        tokens_N1 = torch.where(impossible_N1, logits_NV.argmax(-1, keepdim=True), tokens_N1)
        picked_N1 = logits_NV.gather(-1, tokens_N1)
    logprobs_N1 = picked_N1 - top_N1 - total_N1.log().float()
    return tokens_N1.squeeze(1), logprobs_N1.squeeze(1)


def _first_above(cdf_NB: Tensor, target_N1: Tensor) -> Tensor:
    """Index of the first sum above the target, or of the last one that grew: u * total may round to total.

    Sums that are not numbers give the last index, because one out of bounds would end a CUDA process.
    """
    found_N1 = torch.searchsorted(cdf_NB, target_N1, right=True)
    last_N1 = torch.searchsorted(cdf_NB, cdf_NB[:, -1:].contiguous())
    return torch.minimum(found_N1, last_N1).clamp(max=cdf_NB.shape[-1] - 1)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
