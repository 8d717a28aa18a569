"""From logits to the facts of an audit: log-probability, entropy, ranks, and likelihood ratios of each token.

Each ratio q(token) / p(token) compares honest sampling from p with one way of not doing so, and its mean
under p is at most 1. That is what makes products of them evidence (``audit_evidence.py``).

Legend: N tokens, V vocabulary, A alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roles.verifier.audit_facts import EDITED, FORCED_EOS, SLIP, TEMPERATURES, TOP_K, TOP_P

IMPOSSIBLE = -14.0
"""What stands for the log-probability of a token outside the truncation: rounding may put one there."""

RATIO_MAX = 30.0
"""Bound on one token's log ratio: no single token is worth more."""

TAIL = 256
"""Tokens looked at to find where top-p cuts; a flatter distribution is not tested for that cut."""

_TINY = 1e-12
LEAST = -1e4
"""What stands for log 0 in sums that multiply it with 0."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Facts of N tokens, as in ``TokenFacts``."""

    columns: Tensor
    """logprobs, entropy, varentropy, above, level, below: shape [6, N]."""
    sampling: Tensor
    endings: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """One after the other."""
        columns, sampling, endings = ([getattr(p, name) for p in parts] for name in cls.__slots__)
        return cls(torch.cat(columns, 1), torch.cat(sampling, 1), torch.cat(endings, 1))


def score_tokens(logprobs_NV: Tensor, targets_N: Tensor, eos_ids: Tensor) -> Scored:
    """Facts of ``targets`` under distributions to sample from (fp32 log-probabilities, -inf where cut)."""
    p_NV = logprobs_NV.exp()
    finite_NV = logprobs_NV.clamp(min=LEAST)
    target_N1 = targets_N[:, None]
    raw_N1 = logprobs_NV.gather(-1, target_N1)
    own_N = raw_N1[:, 0].masked_fill(raw_N1[:, 0].isneginf(), IMPOSSIBLE)
    entropy_N = -(p_NV * finite_NV).sum(-1)
    varentropy_N = (p_NV * (finite_NV + entropy_N[:, None]).square()).sum(-1)
    above_N = (p_NV * (logprobs_NV > raw_N1)).sum(-1)
    level_N = (p_NV * (logprobs_NV == raw_N1)).sum(-1)
    below_N = (p_NV.cumsum(-1).gather(-1, target_N1) - p_NV.gather(-1, target_N1))[:, 0]
    columns = torch.stack([own_N, entropy_N, varentropy_N, above_N, level_N, below_N])
    ratios = [
        *_tempered(finite_NV, target_N1, own_N),
        *_truncated(logprobs_NV, p_NV, raw_N1),
        *(_edited(share, p_NV.shape[-1], own_N) for share in EDITED),
    ]
    is_eos_N = torch.isin(targets_N, eos_ids)
    endings = _endings(p_NV[:, eos_ids].sum(-1), is_eos_N)
    return Scored(columns, _bounded(ratios), _bounded(endings))


def _bounded(ratios: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(ratios)).clamp(-RATIO_MAX, RATIO_MAX)


def _tempered(finite_NV: Tensor, target_N1: Tensor, own_N: Tensor) -> list[Tensor]:
    """Ratios for q = p^(1/f) / Z: another temperature (and the likelihood ratio of the surprise -log p)."""
    possible_N = finite_NV.gather(-1, target_N1)[:, 0] > LEAST
    ratios = []
    for factor in TEMPERATURES:
        normalizer_N = (finite_NV / factor).logsumexp(-1)
        ratios.append(torch.where(possible_N, own_N / factor - normalizer_N - own_N, 0.0))
    return ratios


def _truncated(logprobs_NV: Tensor, p_NV: Tensor, raw_N1: Tensor) -> list[Tensor]:
    """Ratios for q = p on its most probable tokens, scaled up to what those leave out, but for a slip."""
    largest_NK = logprobs_NV.topk(min(TAIL, logprobs_NV.shape[-1])).values
    mass_NK = largest_NK.exp().cumsum(-1)
    width = largest_NK.shape[-1]
    cuts: list[tuple[Tensor, Tensor]] = []
    for k in TOP_K:
        last = torch.full_like(raw_N1, min(k, width) - 1, dtype=torch.int64)
        cuts.append((last, torch.full_like(raw_N1[:, 0], k < logprobs_NV.shape[-1], dtype=torch.bool)))
    for mass in TOP_P:
        reached_NK = mass_NK >= mass
        found_N = reached_NK.any(-1)
        cuts.append((reached_NK.int().argmax(-1, keepdim=True), found_N))
    ratios = []
    for last_N1, found_N in cuts:
        least_N1 = largest_NK.gather(-1, last_N1)
        kept_N = (p_NV * (logprobs_NV >= least_N1)).sum(-1).clamp(_TINY, 1.0)
        inside_N = raw_N1[:, 0] >= least_N1[:, 0]
        ratio_N = torch.where(inside_N, (1 - SLIP) / kept_N + SLIP, torch.full_like(kept_N, SLIP)).log()
        ratios.append(torch.where(found_N, ratio_N, torch.zeros_like(ratio_N)))
    return ratios


def _edited(share: float, vocabulary: int, own_N: Tensor) -> Tensor:
    """Ratios for q = p, but for a share of tokens drawn evenly from the vocabulary."""
    evenly_N = math.log(share / vocabulary) - own_N
    return torch.logaddexp(evenly_N, torch.full_like(own_N, math.log1p(-share)))


def _endings(eos_N: Tensor, is_eos_N: Tensor) -> list[Tensor]:
    """Ratios for q that puts EOS at a share of the tokens, or (but for a slip) never."""
    eos_N, others_N = eos_N.clamp(_TINY, 1.0), (1 - eos_N).clamp(_TINY, 1.0)
    ratios = [((1 - share) + share * is_eos_N / eos_N).log() for share in FORCED_EOS]
    ratios.append(torch.where(is_eos_N, torch.full_like(eos_N, SLIP), (1 - SLIP) / others_N + SLIP).log())
    return ratios
