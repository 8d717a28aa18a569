"""Scores items with a run's rewards in workers, as a verifier does."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.runspec import RewardSpec
from roles.verifier.rewards.reward import Item
from roles.verifier.rewards.scorer import Scored, Scorer


async def scored(items: Sequence[Item], *specs: RewardSpec) -> list[Scored]:
    async with Scorer(specs, workers=1) as scorer:
        return await scorer.score(items)
