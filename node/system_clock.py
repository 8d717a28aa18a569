"""Real time behind the Clock port."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """The machine's clocks and the event loop's sleep."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)
