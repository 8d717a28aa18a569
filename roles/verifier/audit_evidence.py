"""From a group and the facts that were recomputed for it to the evidence of one audit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.arrays import FloatArray
from protocol.audit_spec import ToleranceSpec
from protocol.messages import Rollout, RolloutGroup, Task
from roles.streams import turn_draws
from roles.turns.spans import turn_lengths
from roles.verifier.audit_agreement import differences, exceeded, seed_distance
from roles.verifier.audit_copies import Copies
from roles.verifier.audit_facts import Numbers, TokenFacts, standardized_surprise
from roles.verifier.audit_stream import Evidence

SEED_DRAWS = 1 << 12
"""Uniform numbers of one rollout that are compared; later tokens are left to the other tests."""


def chosen_rollouts(
    group: RolloutGroup, prompt_tokens: int, tokens_max: int, rng: np.random.Generator
) -> list[Rollout]:
    """Rollouts to audit, in a random order of their choice: as many as fit ``tokens_max``, at least one."""
    chosen: list[Rollout] = []
    total = 0
    for place in rng.permutation(len(group.rollouts)):
        rollout = group.rollouts[place]
        total += prompt_tokens + len(rollout.token_ids)
        if chosen and total > tokens_max:
            break
        chosen.append(rollout)
    return sorted(chosen, key=lambda rollout: rollout.index)


def evidence_of(
    task: Task,
    rollouts: Sequence[Rollout],
    facts: Sequence[TokenFacts],
    tolerance: ToleranceSpec,
    copies: Copies,
    rng: np.random.Generator,
) -> Evidence:
    """What the audit of ``rollouts`` says; ``rng`` breaks ties between equally probable tokens.

    ``facts`` are those of sampled tokens only.
    """
    numbers = differences([claimed_logprobs(rollout) for rollout in rollouts], facts)
    if tolerance.seed is not None:
        drawn = [_drawn(task, rollout) for rollout in rollouts]
        numbers["seed"] = seed_distance(drawn, [one.of(slice(SEED_DRAWS)) for one in facts])
    flags = exceeded(numbers, tolerance)
    numbers["surprise"] = standardized_surprise(list(facts))
    numbers["tokens"] = float(sum(len(one) for one in facts))
    ranks = [np.clip(one.above + one.level * rng.random(len(one)), 0, 1) for one in facts]
    return Evidence(
        flags=flags,
        flag_rate=tolerance.flag_rate,
        sampling=np.sum([one.sampling.sum(1) for one in facts], axis=0),
        endings=np.sum([one.endings.sum(1) for one in facts], axis=0),
        copies=copies.log_ratios(task, rollouts, facts),
        ranks=np.concatenate(ranks),
        numbers=numbers,
    )


def claimed_logprobs(rollout: Rollout) -> FloatArray:
    """What the sampler says of the tokens that it sampled."""
    claimed: FloatArray = rollout.sampler_logprobs[rollout.sampled]
    return claimed


def _drawn(task: Task, rollout: Rollout) -> Numbers:
    """What an honest sampler draws the first tokens with, one turn after the other."""
    return turn_draws(task.seed, rollout.index, turn_lengths(rollout.sampled))[:SEED_DRAWS]
