"""From verified groups to samples: advantages within each group, and the numbers people watch (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from protocol.clock import VectorClock
from protocol.messages import FinishReason
from protocol.runspec import LossSpec
from roles.learner.advantages import group_advantages
from roles.learner.buffer import Candidate
from roles.learner.policy import Sample
from roles.turns.spans import turn_lengths


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything one optimizer step trains on."""

    samples: tuple[Sample, ...]
    metrics: dict[str, float]
    staleness_max: float


def make_batch(candidates: Sequence[Candidate], loss: LossSpec, clock: VectorClock, version: float) -> Batch:
    """Samples of all groups; ``clock`` and ``version`` are the learner's at the start of the step.

    Unscorable rollouts get advantage zero and stay out of the baseline.
    """
    samples: list[Sample] = []
    zero_spread = 0
    for candidate in candidates:
        advantages = group_advantages(candidate.rewards, loss)
        zero_spread += advantages.zero_spread
        for rollout, advantage in zip(candidate.group.rollouts, advantages.values, strict=True):
            samples.append(
                Sample(
                    prompt_token_ids=candidate.task.prompt_token_ids,
                    token_ids=rollout.token_ids,
                    sampler_logprobs=rollout.sampler_logprobs,
                    advantage=float(advantage),
                    truncated=rollout.finish is FinishReason.LENGTH,
                    temperature=candidate.task.params.temperature,
                    on_policy=candidate.group.clock == clock,
                    loss_mask=rollout.loss_mask,
                )
            )
    ages = [version - candidate.version for candidate in candidates]
    metrics = _reward_metrics(candidates) | _length_metrics(samples)
    metrics |= {
        "frac_reward_zero_std": zero_spread / len(candidates),
        "sample/staleness_mean": fmean(ages),
        "sample/staleness_max": max(ages),
        "batch/groups_per_step": float(len(candidates)),
        "batch/samples_per_step": float(len(samples)),
    }
    return Batch(tuple(samples), metrics, max(ages))


def _reward_metrics(candidates: Sequence[Candidate]) -> dict[str, float]:
    scored = [[reward for reward in candidate.rewards if reward is not None] for candidate in candidates]
    metrics = {
        "reward": fmean(reward for group in scored for reward in group),
        "reward_std": fmean(pstdev(group) for group in scored),
        "sample/unscorable_frac": 1 - sum(map(len, scored)) / sum(len(c.rewards) for c in candidates),
    }
    by_name: dict[str, list[float]] = {}
    for candidate in candidates:
        for verdict in candidate.verified.verdicts:
            for name, score in verdict.scores.items():
                if score is not None:
                    by_name.setdefault(name, []).append(score)
    return metrics | {f"rewards/{name}": fmean(values) for name, values in by_name.items()}


def _length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [sample.trained_tokens for sample in samples]
    turns = [len(turn_lengths(sample.trained)) for sample in samples]
    whole = [len(sample.prompt_token_ids) + len(sample.token_ids) for sample in samples]
    ended = [sample.trained_tokens for sample in samples if not sample.truncated]
    terminated = {"completions/mean_terminated_length": fmean(ended)} if ended else {}
    return terminated | {
        "sample/tokens_mean": fmean(whole),
        "sample/tokens_max": float(max(whole)),
        "rollout/turns_mean": fmean(turns),
        "rollout/turns_max": float(max(turns)),
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": fmean(sample.truncated for sample in samples),
    }
