"""What a store does on this node's own disk: copies of entries, and entries on their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from node.off_loop import OffLoop
from protocol.errors import StoreUnavailable

T = TypeVar("T")


class OwnDisk:
    """A directory of this node, for work off the event loop."""

    def __init__(self, directory: Path, timeout_s: float, off_loop: OffLoop) -> None:
        """Nothing is made here."""
        self._directory = directory
        self._timeout_s = timeout_s
        self._off_loop = off_loop

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. Raises StoreUnavailable for a disk that fails or hangs."""

        def translated() -> T:
            try:
                return work()
            except OSError as exc:
                raise StoreUnavailable(
                    f"{exc.strerror or exc} in {self._directory}, this node's own"
                ) from exc

        try:
            return await self._off_loop.run(translated, self._timeout_s)
        except TimeoutError as exc:
            waited = f"{self._directory}, of this node, did not answer in {self._timeout_s:g} s"
            raise StoreUnavailable(waited) from exc
