"""One draw per row from the distribution that the sampling parameters give.

Legend: N rows, V tokens of the vocabulary. A vocabulary is wide and a step samples once from each row, so the
full log-softmax is never written down: one pass gives exp(logit - max), sums of blocks find the block that a
draw falls into, and only that block is summed token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from roles.torch_sampling import widest

BLOCK = 256
"""Tokens that are summed together in a draw: near the square root of a large vocabulary."""


def draw(logits_NV: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits) by inverse CDF: tokens [N] and their log-probabilities [N] in fp32.

    ``uniforms_N`` lie in [0, 1). A token of zero probability is never drawn; where the logits are NaN, so is
    the log-probability returned.
    """
    rows, vocab = logits_NV.shape
    wide = widest(logits_NV.device)
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
