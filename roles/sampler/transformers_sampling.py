"""One draw per row from the distribution that the sampling parameters give.

Legend: N rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roles.torch_sampling import RowParams, sampling_logprobs, widest

__all__ = ["RowParams", "draw", "sampling_logprobs"]


def draw(logprobs_NV: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by inverse CDF: tokens [N] and their log-probabilities [N] in fp32.

    ``uniforms_N`` lie in [0, 1). A token of zero probability is never drawn; where the
    log-probabilities are NaN, so is the one returned.
    """
    wide = widest(logprobs_NV.device)
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=wide)
    total_N1 = cdf_NV[:, -1:].contiguous()
    target_N1 = uniforms_N.to(wide).unsqueeze(1) * total_N1
    tokens_N1 = torch.searchsorted(cdf_NV, target_N1, right=True)
    # u * total may round up to total: the last token with mass is the answer then, not V.
    tokens_N1 = torch.minimum(tokens_N1, torch.searchsorted(cdf_NV, total_N1))
    # Sums that are not numbers are found at V, and an index out of bounds ends a CUDA process.
    tokens_N1 = tokens_N1.clamp(max=logprobs_NV.shape[-1] - 1)
    picked_N1 = logprobs_NV.gather(-1, tokens_N1)
    # A parallel sum on an accelerator need not be monotone to the last bit.
    impossible_N1 = torch.isneginf(picked_N1)
    if bool(impossible_N1.any()):
        tokens_N1 = torch.where(impossible_N1, logprobs_NV.argmax(-1, keepdim=True), tokens_N1)
        picked_N1 = logprobs_NV.gather(-1, tokens_N1)
    return tokens_N1.squeeze(1), picked_N1.squeeze(1)
