"""The items of one group on their way through the pool, and the tasks that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from protocol.runspec import RewardSpec
from roles.verifier.rewards.reward import Item, Score


class Batch:
    """Collects one score per item from however many tasks serve them."""

    def __init__(self, spec: RewardSpec, items: Sequence[Item]) -> None:
        """``items`` belong to one group."""
        self.spec = spec
        self.items = list(items)
        self._scores: list[Score | None] = [None] * len(self.items)
        self._deaths = [0] * len(self.items)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, serving: Coroutine[Any, Any, None]) -> None:
        """Let a task serve some of the items."""
        self._tasks.add(asyncio.create_task(serving))

    def settle(self, index: int, score: Score) -> None:
        """An item has its score."""
        self._scores[index] = score

    def mark_death(self, index: int) -> None:
        """A worker died on this item."""
        self._deaths[index] += 1

    def deaths_of(self, index: int) -> int:
        """How many workers died on this item."""
        return self._deaths[index]

    async def scores(self) -> list[Score]:
        """All scores, in order, once they are there. Raises what a task raised; cancels the others then."""
        try:
            while self._tasks:
                done, _ = await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= done  # serving tasks begin others
                for task in done:
                    task.result()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        found = [score for score in self._scores if score is not None]
        assert len(found) == len(self.items), "every item was served"
        return found
