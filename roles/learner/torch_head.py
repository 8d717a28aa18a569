"""Log-probabilities from hidden states in chunks: forward and backward never hold all logits.

The gradient of a token's log-probability with respect to its hidden state is (W[target] - p W) / temperature,
one vector a token. It is computed in the forward pass, while the chunk's probabilities are there, and only
scaled in the backward pass: the head's product is not computed twice, and what is kept has the size of the
hidden states.

Shape legend: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probability and entropy of each completion token at its temperature, fp32, shape [N]."""

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """What a causal language model does with its last hidden states: logits = cap(factor · W h)."""

    weight: Tensor
    """Shape [V, H], frozen."""
    factor: float = 1.0
    softcap: float | None = None

    def chunk(self, logits_max: int) -> int:
        """Tokens whose logits may exist at once."""
        return max(1, logits_max // self.weight.shape[0])


def chunked_scores(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, temperatures_N: Tensor, logits_max: int
) -> TokenScores:
    """Score ``targets`` from the hidden states that predict them; the entropy carries no gradient."""
    logprobs, entropy = _Chunked.apply(hidden_NH, head, targets_N, temperatures_N, logits_max)
    return TokenScores(logprobs, entropy)


class _Chunked(torch.autograd.Function):
    """See the head of this file."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, head: Head, targets_N: Tensor, temperatures_N: Tensor, logits_max: int
    ) -> tuple[Tensor, Tensor]:
        size = head.chunk(logits_max)
        logprobs = torch.empty_like(temperatures_N)
        entropy = torch.empty_like(temperatures_N)
        slopes = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden_NH), size):
            some = slice(start, start + size)
            chunk = _Chunk(hidden_NH[some], head, targets_N[some], temperatures_N[some])
            logprobs[some], entropy[some] = chunk.logprobs, chunk.entropy
            if slopes is not None:
                slopes[some] = chunk.slopes()
        if slopes is not None:
            ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        (slopes_NH,) = ctx.saved_tensors
        return (gradient_N[:, None] * slopes_NH).to(slopes_NH.dtype), None, None, None, None


class _Chunk:
    """Some tokens with all their logits."""

    def __init__(self, hidden: Tensor, head: Head, targets: Tensor, temperatures: Tensor) -> None:
        self._head, self._targets, self._dtype = head, targets, hidden.dtype
        logits = torch.mm(hidden, head.weight.T).float()
        if head.factor != 1:
            logits *= head.factor
        self._cap_slope = None
        if head.softcap is not None:
            logits = torch.tanh(logits / head.softcap)
            self._cap_slope = 1 - logits.square()
            logits *= head.softcap
        self._scale = head.factor / temperatures[:, None]
        logits /= temperatures[:, None]
        logprobs = torch.log_softmax(logits, -1)
        self.logprobs = logprobs.gather(-1, targets[:, None])[:, 0]
        self._probabilities = torch.exp(logprobs, out=logits)
        self.entropy = -torch.linalg.vecdot(self._probabilities, logprobs)

    def slopes(self) -> Tensor:
        """Gradient of each log-probability with respect to its hidden state, shape [chunk, H]."""
        weight = self._head.weight
        if self._cap_slope is None:
            slopes = weight[self._targets].float() - torch.mm(self._probabilities.to(weight.dtype), weight)
        else:
            ones = torch.zeros_like(self._probabilities).scatter_(-1, self._targets[:, None], 1.0)
            inner = (ones - self._probabilities) * self._cap_slope
            slopes = torch.mm(inner.to(weight.dtype), weight)
        return (slopes.float() * self._scale).to(self._dtype)
