"""What a step did, in the field's metric names: computed once over all its trained tokens.

Everything is measured before truncation and masking, so that a drift is seen before it is corrected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.runspec import LossSpec
from roles.learner.torch_loss import TokenBatch, capped, correction_weight, kl_to_genesis, log_ratio, proximal


def loss_metrics(step: TokenBatch, spec: LossSpec) -> dict[str, float]:
    """Metrics of a whole step (``TokenBatch.joined`` of its micro-batches).

    ``ratio`` and ``kl`` (the mean of ``(r - 1) - log r``) are the learner's against the sampler, per token.
    """
    with torch.no_grad():
        drift = capped(step.learner_logprobs - step.sampler_logprobs, spec)
        own = log_ratio(step, spec)
        scalars = {
            "ratio": drift.exp().mean(),
            "kl": (drift.exp() - 1 - drift).mean(),
            "entropy": step.entropy.mean(),
            "ratio_capped_total": (own.abs() > spec.log_ratio_max).sum(),
            **_clip_ratios(step, capped(own, spec).exp(), spec),
            **_mismatch(step, spec),
        }
        if step.genesis_logprobs is not None:
            scalars["kl_genesis"] = kl_to_genesis(step, capped(own, spec).exp(), spec).mean()
        numbers = torch.stack([value.to(torch.float32) for value in scalars.values()]).tolist()
    return dict(zip(scalars, numbers, strict=True))


def ratio_deviation(step: TokenBatch, rows_on_policy: Tensor, spec: LossSpec) -> float | None:
    """Largest ``|ratio - 1|`` of a token among the rows that are on policy; None when there are none.

    ``rows_on_policy`` is boolean, shape [R].
    """
    chosen = rows_on_policy[step.rows]
    if not bool(chosen.any()):
        return None
    drift = capped((step.learner_logprobs - step.sampler_logprobs)[chosen], spec)
    return float(torch.expm1(drift).abs().max())


def _clip_ratios(step: TokenBatch, ratio: Tensor, spec: LossSpec) -> dict[str, Tensor]:
    """Share of tokens (of rows, at sequence level) whose ratio lies where the clip takes the gradient."""
    advantages = step.token_advantages
    low = ((ratio < 1 - spec.clip_low) & (advantages < 0)).to(ratio.dtype)
    high = ((ratio > 1 + spec.clip_high) & (advantages > 0)).to(ratio.dtype)
    low_rows, high_rows = step.row_means(low), step.row_means(high)
    per_row = spec.ratio_level == "sequence"
    low_mean = (low_rows if per_row else low).mean()
    high_mean = (high_rows if per_row else high).mean()
    return {
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/region_mean": low_mean + high_mean,
        "clip_ratio/low_min": low_rows.min(),
        "clip_ratio/high_max": high_rows.max(),
    }


def _mismatch(step: TokenBatch, spec: LossSpec) -> dict[str, Tensor]:
    """The raw importance weights between the sampler and the start of the step."""
    difference = proximal(step) - step.sampler_logprobs
    weight = capped(difference, spec).exp()
    scalars = {
        "sampling/sampling_logp_difference/mean": difference.abs().mean(),
        "sampling/sampling_logp_difference/max": difference.abs().max(),
        "sampling/importance_sampling_ratio/min": weight.min(),
        "sampling/importance_sampling_ratio/mean": weight.mean(),
        "sampling/importance_sampling_ratio/max": weight.max(),
        # Scaled by the largest weight first: its square must not overflow.
        "sampling/ess": (weight / weight.max()).sum() ** 2
        / ((weight / weight.max()) ** 2).sum()
        / weight.numel(),
    }
    if spec.correction != "none":
        scalars["sampling/masked_frac"] = (correction_weight(step, spec) == 0).to(weight.dtype).mean()
    return scalars
