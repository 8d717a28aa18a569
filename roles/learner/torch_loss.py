"""The GRPO objective: small pure functions that the numbers of ``LossSpec`` compose.

    log ratio -> ratio -> clipped surrogate -> correction weight -> + KL - entropy -> aggregation

Shape legend: N trained tokens of all rows of a micro-batch, one row after the other; R rows (rollouts).
A token that is not to be trained on (a truncated completion under ``mask_truncated``) is left out by the
caller, so no mask can leak. The divisors span the whole optimizer step and are passed in: the sum of the
contributions of any cut into micro-batches is the same number with the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from protocol.runspec import LossSpec


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What a whole optimizer step trains on, rows without advantage included: the loss's divisors."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of a micro-batch."""

    learner_logprobs: Tensor
    """Shape [N], with gradient."""
    sampler_logprobs: Tensor
    """Shape [N]."""
    rows: Tensor
    """Row of each token, shape [N], int64."""
    advantages: Tensor
    """Shape [R]."""
    entropy: Tensor
    """Entropy in nats of the distribution that each token was drawn from, shape [N]."""
    genesis_logprobs: Tensor | None = None
    """Shape [N]; needed when ``kl_beta`` is not 0."""
    proximal_logprobs: Tensor | None = None
    """The learner's at the start of the step, shape [N]; absent when the step has a single pass, where
    they are the learner's own."""

    @property
    def token_advantages(self) -> Tensor:
        """Each token's advantage, shape [N]."""
        return self.advantages[self.rows]

    @property
    def lengths(self) -> Tensor:
        """Trained tokens of each row, shape [R], floating point."""
        return self.row_sums(torch.ones_like(self.sampler_logprobs))

    def row_sums(self, values: Tensor) -> Tensor:
        """Sum ``values`` [N] over each row, shape [R]."""
        return values.new_zeros(self.advantages.shape[0]).index_add(0, self.rows, values)

    def row_means(self, values: Tensor) -> Tensor:
        """Mean of ``values`` [N] over each row, shape [R]."""
        return self.row_sums(values) / self.lengths.clamp(min=1)

    def detached(self) -> TokenBatch:
        """The same numbers without their graph."""
        optional = (self.genesis_logprobs, self.proximal_logprobs)
        return TokenBatch(
            self.learner_logprobs.detach(),
            self.sampler_logprobs,
            self.rows,
            self.advantages,
            self.entropy.detach(),
            *(tensor if tensor is None else tensor.detach() for tensor in optional),
        )

    def to(self, device: torch.device) -> TokenBatch:
        """The same on another device."""
        moved: dict[str, Any] = {
            field.name: None if (tensor := getattr(self, field.name)) is None else tensor.to(device)
            for field in fields(self)
        }
        return replace(self, **moved)

    @classmethod
    def joined(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """All tokens of several micro-batches; rows are numbered through."""
        starts = [0]
        for batch in batches:
            starts.append(starts[-1] + batch.advantages.shape[0])
        genesis = [batch.genesis_logprobs for batch in batches if batch.genesis_logprobs is not None]
        proximal = [batch.proximal_logprobs for batch in batches if batch.proximal_logprobs is not None]
        return cls(
            torch.cat([batch.learner_logprobs for batch in batches]),
            torch.cat([batch.sampler_logprobs for batch in batches]),
            torch.cat([batch.rows + start for batch, start in zip(batches, starts, strict=False)]),
            torch.cat([batch.advantages for batch in batches]),
            torch.cat([batch.entropy for batch in batches]),
            torch.cat(genesis) if len(genesis) == len(batches) else None,
            torch.cat(proximal) if len(proximal) == len(batches) else None,
        )


def capped(log_ratio: Tensor, spec: LossSpec) -> Tensor:
    """Bound a log-ratio on both sides, so that ``exp`` of it is finite; gradients beyond are zero."""
    return log_ratio.clamp(-spec.log_ratio_max, spec.log_ratio_max)


def proximal(batch: TokenBatch) -> Tensor:
    """Log-probabilities of the policy that the step started from, shape [N], without gradient."""
    return batch.learner_logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs


def log_ratio(batch: TokenBatch, spec: LossSpec) -> Tensor:
    """Log of the importance ratio, uncapped, shape [N].

    It is anchored on the sampler, or, where a correction weight already stands for what lies between the
    sampler and the start of the step, on the latter (decoupled PPO, arXiv 2110.00641). At ``sequence``
    level every token of a row has the row's mean (GSPO, arXiv 2507.18071).
    """
    decoupled = spec.correction not in ("none", "negative_mask")
    anchor = proximal(batch) if decoupled else batch.sampler_logprobs
    per_token = batch.learner_logprobs - anchor
    return batch.row_means(per_token)[batch.rows] if spec.ratio_level == "sequence" else per_token


def surrogate(ratio: Tensor, batch: TokenBatch, spec: LossSpec) -> Tensor:
    """Policy loss of each token, shape [N].

    ``-min(r A, clip(r) A)``, at most ``-dual_clip A`` for negative A (arXiv 1912.09729); or, detached,
    ``-sg(clip(r)) A log pi``, in which no token loses its gradient (CISPO, arXiv 2506.13585).
    """
    advantages = batch.token_advantages
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    if spec.detached_weight:
        return -clipped.detach() * advantages * batch.learner_logprobs
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if spec.dual_clip is not None:
        floor = torch.maximum(objective, spec.dual_clip * advantages)
        objective = torch.where(advantages < 0, floor, objective)
    return -objective


def correction_weight(batch: TokenBatch, spec: LossSpec) -> Tensor:
    """What each token's policy loss is multiplied with for being off policy: a constant, shape [N].

    Weights are ``proximal / sampler`` of a token (TIS; mask: IcePop) or the product over its row; see
    ``LossSpec.correction``. Masked tokens still count in the divisors.
    """
    cap = spec.correction_cap
    log_weight = (proximal(batch) - batch.sampler_logprobs).detach()
    token = capped(log_weight, spec).exp()
    sequence = capped(batch.row_sums(log_weight), spec).exp()[batch.rows]
    drift = -batch.row_means(batch.learner_logprobs.detach() - batch.sampler_logprobs)[batch.rows]
    match spec.correction:
        case "truncate":
            return token.clamp(max=cap)
        case "mask":
            return token * ((token <= cap) & (token >= 1 / cap))
        case "sequence_truncate":
            return sequence.clamp(max=cap)
        case "sequence_mask":
            return sequence * (sequence <= cap)
        case "negative_mask":
            return ((batch.token_advantages >= 0) | (capped(drift, spec).exp() <= cap)).to(token.dtype)
        case "none":
            return torch.ones_like(token)


def kl_to_genesis(batch: TokenBatch, ratio: Tensor, spec: LossSpec) -> Tensor:
    """The k3 estimate of KL(learner || genesis) at each token, shape [N]; never negative.

    ``exp(g - l) - (g - l) - 1`` (http://joschu.net/blog/kl-approx.html), times the ratio if ``kl_unbiased``.
    """
    assert batch.genesis_logprobs is not None, "kl_beta needs genesis_logprobs"
    difference = capped(batch.genesis_logprobs - batch.learner_logprobs, spec)
    k3 = difference.exp() - difference - 1
    return k3 * ratio if spec.kl_unbiased else k3


def aggregation_weights(batch: TokenBatch, spec: LossSpec, totals: StepTotals) -> Tensor:
    """What each token's loss counts in the step's, shape [N].

    ``token``: mean over all tokens (DAPO, arXiv 2503.14476); ``sequence``: mean over rows of their means
    (GRPO); ``constant``: a fixed length for every row (Dr. GRPO).
    """
    if spec.aggregation == "token":
        return torch.full_like(batch.sampler_logprobs, 1 / totals.tokens)
    if spec.aggregation == "sequence":
        return (1 / (totals.sequences * batch.lengths.clamp(min=1)))[batch.rows]
    assert spec.aggregation_tokens is not None, "LossSpec checks this"
    return torch.full_like(batch.sampler_logprobs, 1 / (totals.sequences * spec.aggregation_tokens))


def loss_contribution(batch: TokenBatch, spec: LossSpec, totals: StepTotals) -> Tensor:
    """This micro-batch's share of the step's loss, a scalar; the shares of a step add up to its loss."""
    ratio = capped(log_ratio(batch, spec), spec).exp()
    per_token = surrogate(ratio, batch, spec) * correction_weight(batch, spec)
    if spec.kl_beta:
        per_token = per_token + spec.kl_beta * kl_to_genesis(batch, ratio, spec)
    if spec.entropy_coef:
        per_token = per_token - spec.entropy_coef * batch.entropy
    return (per_token * aggregation_weights(batch, spec, totals)).sum()
