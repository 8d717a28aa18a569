"""Rollouts with turns: replies are context; loss, counts and gradient are those of sampled tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from protocol.clock import GENESIS
from protocol.messages import FinishReason
from protocol.runspec import LossSpec
from roles.learner.batch import make_batch
from roles.learner.buffer import Candidate
from roles.learner.lease import Lease
from roles.learner.policy import Sample
from roles.learner.torch_policy import TorchPolicy
from tests.build import a_group, a_rollout, a_task, a_verified_group
from tests.ground import Handed
from tests.roles.learner.tiny_llama import VOCABULARY, snapshot, some_samples

MASKS = ([1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1])


def conversations(seed: int = 3) -> list[Sample]:
    """Two rollouts of one prompt and two of another, with masked stretches in three of them."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in (4, 4, 2, 2)]
    prompts[1], prompts[3] = prompts[0], prompts[2]
    return [
        Sample(
            prompt_token_ids=prompt,
            token_ids=rng.integers(3, VOCABULARY, len(mask)).astype(np.int32),
            sampler_logprobs=(rng.normal(-3, 0.3, len(mask)) * mask).astype(np.float32),
            advantage=advantage,
            truncated=False,
            temperature=0.8,
            loss_mask=None if all(mask) else np.array(mask, np.uint8),
        )
        for prompt, mask, advantage in zip(prompts, MASKS, (1.0, -0.5, 0.75, -1.25), strict=True)
    ]


def by_hand(policy: TorchPolicy, samples: list[Sample], aggregation: str) -> tuple[float, float]:
    """Loss and norm of its gradient from the model's own logits, token after token."""
    rows = []
    for sample, mask in zip(samples, MASKS, strict=True):
        ids = [*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]
        logits = policy._causal(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        losses = []
        for place, (token, sampled) in enumerate(zip(sample.token_ids.tolist(), mask, strict=True)):
            if sampled:
                before = len(sample.prompt_token_ids) + place - 1
                logprob = torch.log_softmax(logits[before] / sample.temperature, -1)[token]
                ratio = (logprob - float(sample.sampler_logprobs[place])).exp()
                clipped = ratio.clamp(0.8, 1.2)
                losses.append(-torch.minimum(ratio * sample.advantage, clipped * sample.advantage))
        rows.append(torch.stack(losses))
    loss = torch.cat(rows).mean() if aggregation == "token" else torch.stack([r.mean() for r in rows]).mean()
    gradients = torch.autograd.grad(loss, list(policy._factors.values()))
    return float(loss.detach()), float(sum(g.square().sum() for g in gradients) ** 0.5)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("packed", [True, False])
def test_loss_and_gradient_are_those_of_the_sampled_tokens_alone(open_policy, aggregation, packed):
    policy = open_policy({"aggregation": aggregation})
    policy._rows.packed = packed
    samples = conversations()
    loss, gradient_norm = by_hand(policy, samples, aggregation)
    result = policy.step(samples, 0)
    assert result.metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert result.metrics["batch/trained_tokens_per_step"] == sum(map(sum, MASKS))
    assert result.metrics["grad_norm"] == pytest.approx(gradient_norm, rel=1e-4)


def test_the_loss_does_not_depend_on_how_conversations_are_cut_into_micro_batches(open_policy):
    losses = [
        open_policy(micro_batch_tokens=tokens).step(conversations(), 0).metrics["loss"]
        for tokens in (4096, 8, 1)
    ]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_what_stands_as_logprob_of_a_masked_token_changes_nothing(open_policy):
    ones = [replace(s, sampler_logprobs=s.sampler_logprobs - 7 * (~s.trained)) for s in conversations()]
    plain, changed = open_policy(), open_policy()
    plain.step(conversations(), 0)
    changed.step(ones, 0)
    assert snapshot(plain) == snapshot(changed)


def test_masked_tokens_are_context_for_what_follows(open_policy):
    samples = conversations()
    other = samples[0].token_ids.copy()
    other[2] = (other[2] + 1) % VOCABULARY
    losses = [
        open_policy().step([replace(samples[0], token_ids=ids), *samples[1:]], 0).metrics["loss"]
        for ids in (samples[0].token_ids, other)
    ]
    assert losses[0] != losses[1]


def test_a_mask_of_ones_is_no_mask(open_policy):
    masked, plain = open_policy(), open_policy()
    samples = some_samples()
    masked.step([replace(s, loss_mask=np.ones(len(s.token_ids), np.uint8)) for s in samples], 0)
    plain.step(samples, 0)
    assert snapshot(masked) == snapshot(plain)


def test_a_mask_of_another_length_is_refused(open_policy):
    short = replace(some_samples()[0], loss_mask=np.ones(50, np.uint8))
    with pytest.raises(ValueError, match="a mask of 50"):
        open_policy().step([short], 0)


def test_lengths_count_what_was_sampled():
    turns: dict[str, Any] = {
        "token_ids": [4, 2, 5, 6, 2],
        "sampler_logprobs": [-1.0, -1.0, 0.0, 0.0, -1.0],
        "loss_mask": [1, 1, 0, 0, 1],
    }
    cut = a_rollout(index=1, token_ids=[9] * 5, sampler_logprobs=[-1.0] * 5, finish=FinishReason.LENGTH)
    task = a_task()
    group = a_group(task, rollouts=(a_rollout(**turns), cut))
    candidate = Candidate(task, group, a_verified_group(group), Lease(Handed()), 0.0)
    batch = make_batch([candidate], LossSpec(), GENESIS, 0.0)
    assert batch.metrics["completions/mean_length"] == 4.0
    assert batch.metrics["completions/mean_terminated_length"] == 3.0
    assert batch.metrics["sample/tokens_max"] == 4 + 5
    assert batch.metrics["rollout/turns_mean"] == 1.5
    assert batch.metrics["rollout/turns_max"] == 2.0
    assert batch.samples[0].trained.tolist() == [True, True, False, False, True]
    assert batch.samples[1].loss_mask is None
