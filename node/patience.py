"""How long one operation on a remote store may take, and the pauses between its tries."""

from __future__ import annotations

import asyncio
import random

FIRST_PAUSE_S = 0.5
PAUSE_MAX_S = 8.0


class Patience:
    """A deadline, and pauses that double up to a bound, each half as long to half as long again."""

    def __init__(
        self, timeout_s: float, first_pause_s: float = FIRST_PAUSE_S, pause_max_s: float = PAUSE_MAX_S
    ) -> None:
        """The time runs from now on."""
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._first_pause_s = first_pause_s
        self._pause_max_s = pause_max_s
        self._next_pause_s = first_pause_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, not negative."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def pause(self, at_least_s: float = 0.0) -> bool:
        """Wait before the next try; False, at once, if the deadline comes before it."""
        wait_s = max(at_least_s, self._next_pause_s * random.uniform(0.5, 1.5))
        if wait_s >= self.left_s:
            return False
        self._next_pause_s = min(2 * self._next_pause_s, self._pause_max_s)
        await asyncio.sleep(wait_s)
        return True

    def took_effect(self) -> None:
        """A try succeeded: the next fault is a new one."""
        self._next_pause_s = self._first_pause_s
