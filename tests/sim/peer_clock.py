"""A peer's own clock: set wrong, running fast or slow, and at a standstill while the peer is frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node.virtual_time import VirtualClock


class PeerClock:
    """The Clock port of one machine. ``rate`` is its seconds per true second, ``ahead_s`` how wrong its
    wall clock is.

    A frozen process (SIGSTOP) gets nothing back from anybody; its clocks go on. All that waits for the
    outside must therefore also wait for ``thawed``.
    """

    def __init__(self, rate: float = 1.0, ahead_s: float = 0.0) -> None:
        self.rate = rate
        self.ahead_s = ahead_s
        self.frozen = False
        self._true = VirtualClock()
        self._thaw = asyncio.Event()
        self._on_thaw: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        """Seconds as this machine counts them."""
        return self._true.monotonic() * self.rate

    def wall(self) -> float:
        """Unix seconds as this machine believes."""
        return self._true.wall() + self.ahead_s

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await self._true.sleep(seconds / self.rate)
        await self.thawed()

    def freeze(self) -> None:
        """Stop the process."""
        self.frozen = True
        self._thaw.clear()

    def thaw(self) -> None:
        """Let it go on: everything that came meanwhile comes now."""
        self.frozen = False
        self._thaw.set()
        waiting, self._on_thaw = self._on_thaw, []
        for action in waiting:
            action()

    async def thawed(self) -> None:
        """Wait until the process runs."""
        while self.frozen:
            await self._thaw.wait()

    def when_thawed(self, action: Callable[[], None]) -> None:
        """Act now, or as soon as the process runs."""
        if self.frozen:
            self._on_thaw.append(action)
        else:
            action()
