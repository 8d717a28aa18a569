"""Log-probabilities and entropies of completion tokens, without ever holding the logits of all of them.

    packed row ─┐
                ├─▶ model without its head ─▶ hidden states that predict a completion token ─▶ head, in chunks
    padded rows ┘

Shape legend: B rows, T padded length, N completion tokens of all rows one after the other (less those that a
``loss_mask`` masks), H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from roles.learner.policy import Sample
from roles.learner.torch_head import Head, TokenScores, chunked_scores
from roles.learner.torch_packed_row import PackedRow
from roles.torch_logit_head import head_settings, logit_head

LOGITS_MAX = 1 << 23
"""Logits computed at once: 32 MiB in fp32, a few times that while their softmax and gradient live."""


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Prompts with their completions, padded on the right.

    Masks come from lengths, never from ids: the padding id is often EOS, and EOS is a trained token.
    """

    token_ids: Tensor
    """Shape [B, T]."""
    attention: Tensor
    """1 where a token is, 0 where padding is, shape [B, T]."""
    rows: Tensor
    """Row of each completion token, shape [N]."""
    positions: Tensor
    """Position of the hidden state that predicts each completion token, the one before it, shape [N]."""
    targets: Tensor
    """The completion tokens, shape [N]."""
    temperatures: Tensor
    """Temperature at which each was sampled, shape [N]."""

    @property
    def tokens(self) -> int:
        """Without padding."""
        return int(self.attention.sum())

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> PaddedRows:
        """Lay out ``samples`` in order; raises ValueError on an empty prompt."""
        prompts = [len(sample.prompt_token_ids) for sample in samples]
        lengths = [len(sample.token_ids) for sample in samples]
        if min(prompts) < 1:
            raise ValueError("a prompt needs at least one token to predict the first of its completion")
        width = max(p + n for p, n in zip(prompts, lengths, strict=True))
        token_ids = np.zeros((len(samples), width), np.int64)
        attention = np.zeros((len(samples), width), np.int64)
        for row, sample in enumerate(samples):
            end = prompts[row] + lengths[row]
            token_ids[row, : prompts[row]] = sample.prompt_token_ids
            token_ids[row, prompts[row] : end] = sample.token_ids
            attention[row, :end] = 1
        trained = np.concatenate([sample.trained for sample in samples])
        arrays = (
            token_ids,
            attention,
            np.repeat(np.arange(len(samples)), lengths)[trained],
            np.concatenate([np.arange(n) + p - 1 for p, n in zip(prompts, lengths, strict=True)])[trained],
            np.concatenate([np.asarray(sample.token_ids, np.int64) for sample in samples])[trained],
            np.repeat(np.array([sample.temperature for sample in samples], np.float32), lengths)[trained],
        )
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


def score(
    model: Any,
    rows: PaddedRows | PackedRow,
    *,
    entropy_gradient: bool = False,
    logits_max: int = LOGITS_MAX,
) -> TokenScores:
    """Score ``rows`` under a transformers causal language model (the one that a PEFT model wraps).

    Entropy carries a gradient only with ``entropy_gradient``. At most ``logits_max`` logits exist at once.
    """
    hidden_NH = hidden_states(model, rows)
    frozen = frozen_head(model)
    if frozen is not None and not entropy_gradient:
        return chunked_scores(hidden_NH, frozen, rows.targets, rows.temperatures, logits_max)
    return _recomputed_scores(model, hidden_NH, rows, logits_max, entropy_gradient=entropy_gradient)


def hidden_states(model: Any, rows: PaddedRows | PackedRow) -> Tensor:
    """The hidden states that predict each completion token, shape [N, H]."""
    if isinstance(rows, PackedRow):
        ran = model.base_model(
            input_ids=rows.token_ids,
            position_ids=rows.position_ids,
            attention_mask=rows.token_ids.new_zeros(1, 1, 1, 1),  # made already, so that the model makes none
            use_cache=False,
            packed=rows.segments,
        )
        hidden: Tensor = ran.last_hidden_state[0, rows.places]
        return hidden
    ran = model.base_model(input_ids=rows.token_ids, attention_mask=rows.attention, use_cache=False)
    hidden = ran.last_hidden_state[rows.rows, rows.positions]
    return hidden


def _recomputed_scores(
    model: Any, hidden_NH: Tensor, rows: PaddedRows | PackedRow, logits_max: int, *, entropy_gradient: bool
) -> TokenScores:
    """By automatic differentiation, a chunk's logits computed again for its gradient."""
    head = logit_head(model)

    def of_chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        scores = token_scores(head(hidden), targets, temperatures, entropy_gradient=entropy_gradient)
        return scores.logprobs, scores.entropy

    size = max(1, logits_max // int(model.get_output_embeddings().weight.shape[0]))
    chunks = zip(hidden_NH.split(size), rows.targets.split(size), rows.temperatures.split(size), strict=True)
    scored = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return TokenScores(
        torch.cat([logprobs for logprobs, _ in scored]), torch.cat([entropy for _, entropy in scored])
    )


def token_scores(
    logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor, *, entropy_gradient: bool = False
) -> TokenScores:
    """fp32 log-softmax of ``logits / temperature``, at the targets, with the distribution's entropy."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperatures_N[:, None], dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return TokenScores(logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N)


def frozen_head(model: Any) -> Head | None:
    """The LM head as numbers; None if it is more than a frozen matrix (adapted, quantized, with a bias)."""
    projection = model.get_output_embeddings()
    plain = type(projection) is torch.nn.Linear and projection.bias is None
    if not plain or projection.weight.requires_grad:
        return None
    return Head(projection.weight.detach(), *head_settings(model))


def head_deviation(model: Any, token_ids: Sequence[int]) -> float:
    """Largest difference between ``score`` and the log-softmax of the model's own logits for ``token_ids``.

    Far from zero for a model whose head does more than ``logit_head`` knows.
    """
    device = next(model.parameters()).device
    ids = np.asarray(token_ids, np.int32)
    sample = Sample(
        ids[:1], ids[1:], np.zeros(len(ids) - 1, np.float32), 0.0, truncated=False, temperature=1.0
    )
    rows = PaddedRows.of([sample], device)
    with torch.no_grad():
        logits_NV = model(input_ids=rows.token_ids, use_cache=False).logits[0, :-1]
        own = token_scores(logits_NV, rows.targets, rows.temperatures)
        return float((score(model, rows).logprobs - own.logprobs).abs().max())
