"""Advantages: how much better each rollout of a group is than its siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ROUNDING = float(np.finfo(np.float32).eps)
"""Rewards that differ by no more than this, relative to the largest, differ by rounding alone."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """What a group teaches.

    Example: rewards ``[1, 0, None, 0]`` with scale ``none`` have values ``[.667, -.333, 0, -.333]``.
    """

    values: NDArray[np.float64]
    """One advantage per rewards entry, shape [G]; exactly 0.0 for unscorable members."""
    zero_spread: bool
    """No two scorable members differ, so every value is exactly 0.0 and the group teaches nothing."""


def group_advantages(
    rewards: Sequence[float | None],
    scale: Literal["none", "std"],
    *,
    ddof: Literal[0, 1] = 1,
    epsilon: float = 1e-4,
) -> GroupAdvantages:
    """Reward minus the mean of the group's scorable members, divided by their deviation for ``std``.

    ``rewards`` holds None where a rollout could not be scored; such members leave mean and deviation.
    ``none`` is Dr. GRPO (arXiv 2503.20783), ``std`` is GRPO (arXiv 2402.03300), whose deviation is
    that of a sample (n-1) plus 1e-4 unless ``ddof`` and ``epsilon`` say otherwise. Raises ValueError
    on a reward that is not finite.
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
    centred = scored - scored.mean()
    values[scorable] = centred / (scored.std(ddof=ddof) + epsilon) if scale == "std" else centred
    return GroupAdvantages(values, zero_spread=False)
