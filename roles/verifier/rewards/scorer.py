"""The scorer: all rewards of a run on all rollouts of a group, at once, summed by weight.

    reward = sum over the run's rewards of weight * score

If one of them could not score a rollout, that rollout has no reward: a missing term is not zero.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.pool import WorkerPool
from roles.verifier.rewards.registry import INLINE, open_reward
from roles.verifier.rewards.reward import NOTE_CHARS_MAX, Item, Score


@dataclass(frozen=True, slots=True)
class Scored:
    """What a run's rewards say of one rollout; ``reward`` None means that it could not be scored."""

    reward: float | None
    scores: dict[str, float | None] = field(default_factory=dict)
    unscorable: Unscorable | None = None
    note: str = ""


class Scorer:
    """Opens a run's rewards; owns the worker pool if one of them needs it."""

    def __init__(self, specs: Sequence[RewardSpec], workers: int = 2) -> None:
        """``workers`` is how many items are scored at the same time. Raises OperatorError on a bad name."""
        self._specs = tuple(specs)
        self._inline = {spec.name: open_reward(spec) for spec in specs if spec.name in INLINE}
        pooled = [spec for spec in specs if spec.name not in INLINE]
        self._pool = WorkerPool(pooled, workers) if pooled else None

    async def open(self) -> None:
        """Start and warm the workers. Raises OperatorError when a reward cannot be imported."""
        if self._pool is not None:
            await self._pool.open()

    async def warm(self) -> None:
        """Return once all workers are ready; scoring can start before."""
        if self._pool is not None:
            await self._pool.warm()

    async def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            await self._pool.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def score(self, items: Sequence[Item]) -> list[Scored]:
        """One result per item, in order."""
        return list(await asyncio.gather(*(self._score_one(item) for item in items)))

    async def _score_one(self, item: Item) -> Scored:
        found = await asyncio.gather(*(self._by(spec, item) for spec in self._specs))
        return weighed(self._specs, found)

    async def _by(self, spec: RewardSpec, item: Item) -> Score:
        inline = self._inline.get(spec.name)
        if inline is not None:
            return await inline.score(item)
        assert self._pool is not None
        return await self._pool.score(spec, item)


def weighed(specs: Sequence[RewardSpec], found: Sequence[Score]) -> Scored:
    """Weighted sum of the scores of one rollout (pure)."""
    scores = {spec.name: score.value for spec, score in zip(specs, found, strict=True)}
    note = "; ".join(score.note for score in found if score.note)[:NOTE_CHARS_MAX]
    total = 0.0
    for spec, score in zip(specs, found, strict=True):
        if score.value is None:
            return Scored(None, scores, score.unscorable or Unscorable.REWARD_FAILED, note)
        total += spec.weight * score.value
    if not math.isfinite(total):
        return Scored(None, scores, Unscorable.REWARD_FAILED, f"the weighted sum is {total}")
    return Scored(total, scores, None, note)
