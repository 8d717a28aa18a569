"""Advantages: how much better each rollout of a group is than its siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.runspec import AdvantageSpec

ROUNDING = float(np.finfo(np.float32).eps)
"""Rewards that differ by no more than this, relative to the largest, differ by rounding alone."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """What a group teaches.

    Example: rewards ``[1, 0, None, 0]`` have values ``[.667, -.333, 0, -.333]`` if they are not scaled.
    """

    values: NDArray[np.float64]
    """One advantage per rewards entry, shape [G]; exactly 0.0 for unscorable members."""
    zero_spread: bool
    """No two scorable members differ, so every value is exactly 0.0 and the group teaches nothing."""


def group_advantages(rewards: Sequence[float | None], spec: AdvantageSpec) -> GroupAdvantages:
    """Reward minus the group's baseline, divided by the group's deviation for ``advantage_scale = "std"``.

    ``rewards`` holds None where a rollout could not be scored; such members leave baseline and deviation.
    The mean of the others is ``n/(n-1)`` times as far away as the mean of all n (RLOO, arXiv 2402.14740).
    Raises ValueError on a reward that is not finite.
    """
    values = np.zeros(len(rewards), np.float64)
    scorable = np.array([reward is not None for reward in rewards], bool)
    scored = np.array([reward for reward in rewards if reward is not None], np.float64)
    if not np.isfinite(scored).all():
        raise ValueError(f"rewards must be finite or None, got {list(rewards)}")
    # Equality is tested before any arithmetic: the mean of n equal numbers need not be that number,
    # and a tiny deviation would turn the residue into an advantage of order one.
    if scored.size <= 1 or np.ptp(scored) <= ROUNDING * np.abs(scored).max():
        return GroupAdvantages(values, zero_spread=True)
    advantages = scored - scored.mean()
    if spec.advantage_baseline == "leave_one_out":
        advantages *= scored.size / (scored.size - 1)
    if spec.advantage_scale == "std":
        advantages /= scored.std(ddof=spec.advantage_ddof) + spec.advantage_epsilon
    values[scorable] = advantages
    return GroupAdvantages(values, zero_spread=False)
