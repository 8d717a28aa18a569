"""The decoupled objective with one pass a step: what it is, and that a proximal forward changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from protocol.presets import loss_settings
from protocol.runspec import LossSpec
from roles.learner.torch_loss import StepTotals, TokenBatch, loss_contribution
from tests.roles.learner.tiny_llama import gradient_of

LOG_WEIGHTS = [0.1, -0.4, 3.0, 0.2, -0.1]
ADVANTAGES = [1.0, -2.0]
ROWS = [0, 0, 0, 1, 1]


def a_batch() -> tuple[Tensor, TokenBatch]:
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.1, -3.0], requires_grad=True)
    batch = TokenBatch(
        learner_logprobs=logprobs,
        sampler_logprobs=logprobs.detach() - torch.tensor(LOG_WEIGHTS),
        rows=torch.tensor(ROWS),
        advantages=torch.tensor(ADVANTAGES),
        entropy=torch.zeros(5),
    )
    return logprobs, batch


def decoupled(**given) -> LossSpec:
    return LossSpec(**loss_settings("decoupled", given, 8))


def gradient(spec: LossSpec, *, recomputed: bool = False) -> Tensor:
    logprobs, batch = a_batch()
    if recomputed:
        batch = replace(batch, proximal_logprobs=logprobs.detach().clone())
    loss_contribution(batch, spec, StepTotals(5, 2)).backward()
    return gradient_of(logprobs)


def test_its_gradient_is_that_of_truncated_importance_sampling():
    weights = torch.tensor(LOG_WEIGHTS).exp().clamp(max=5.0)
    expected = -weights * torch.tensor(ADVANTAGES)[ROWS] / 5
    assert torch.allclose(gradient(decoupled()), expected)


def test_a_forward_pass_for_the_proximal_policy_would_change_nothing():
    assert torch.equal(gradient(decoupled(), recomputed=True), gradient(decoupled()))


@pytest.mark.parametrize("clip", [0.001, 0.2, 0.9])
def test_its_clip_is_idle(clip):
    spec = decoupled(clip_low=clip, clip_high=clip, dual_clip=1 + clip)
    assert torch.equal(gradient(spec), gradient(decoupled()))
