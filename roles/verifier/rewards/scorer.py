"""The scorer: all rewards of a run on all rollouts of a group, at once, summed by weight.

    reward = sum over the run's rewards of weight * score

If one of them could not score a rollout, that rollout has no reward: a missing term is not zero.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import structlog

from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.sandbox.confinement import Protection
from roles.verifier.rewards.pool import WorkerPool
from roles.verifier.rewards.registry import NO_ARGUMENTS, Place, open_reward, place_of
from roles.verifier.rewards.reward import NOTE_CHARS_MAX, Item, Reward, Score

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Scored:
    """What a run's rewards say of one rollout; ``reward`` None means that it could not be scored."""

    reward: float | None
    scores: dict[str, float | None] = field(default_factory=dict)
    unscorable: Unscorable | None = None
    note: str = ""


class Scorer:
    """Opens a run's rewards; owns a worker pool for each place where one of them runs."""

    def __init__(
        self, specs: Sequence[RewardSpec], workers: int = 2, arguments: Mapping[str, Any] = NO_ARGUMENTS
    ) -> None:
        """``workers`` is how many items are scored at the same time; ``arguments`` are the environment's.

        Raises OperatorError on a bad name.
        """
        self._specs = tuple(specs)
        self._inline: dict[str, Reward] = {}
        self._pools: dict[Place, WorkerPool] = {}
        for place in Place:
            here = [spec for spec in specs if place_of(spec.name) is place]
            if place is Place.INLINE:
                opened = {spec.name: open_reward(spec) for spec in here}
                self._inline = {name: reward for name, reward in opened.items() if isinstance(reward, Reward)}
            elif here:
                self._pools[place] = WorkerPool(here, workers, place, arguments)

    async def open(self) -> None:
        """Start the pools. Raises OperatorError when a reward cannot be imported."""
        await asyncio.gather(*(pool.open() for pool in self._pools.values()))
        for place, pool in self._pools.items():
            _tell(place, pool.protections)

    async def warm(self) -> None:
        """Return once all workers are ready; scoring can start before."""
        await asyncio.gather(*(pool.warm() for pool in self._pools.values()))

    async def close(self) -> None:
        """Stop the workers."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def score(self, items: Sequence[Item]) -> list[Scored]:
        """One result per item of a group, in order."""
        by_reward = await asyncio.gather(*(self._by(spec, items) for spec in self._specs))
        return [weighed(self._specs, scores) for scores in zip(*by_reward, strict=True)]

    async def _by(self, spec: RewardSpec, items: Sequence[Item]) -> list[Score]:
        inline = self._inline.get(spec.name)
        if inline is not None:
            return [await inline.score(item) for item in items]
        return await self._pools[place_of(spec.name)].score(spec, items)


def _tell(place: Place, protections: Sequence[str]) -> None:
    """Log what confines untrusted completions here; loudly if something is missing."""
    missing = [protection for protection in Protection if protection not in protections]
    if place.confined and missing:
        log.warning("sandbox_is_partial", rewards=place, missing=missing, see="docs/rewards.md#the-sandbox")
    elif place.confined:
        log.info("sandbox_ready", rewards=place, protections=list(protections))


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
