"""A node's local copies of store entries: complete, verified, the most recently used ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from node.entry_files import entries_below, install, staging, sweep_staging, verify_entry
from protocol.errors import StoreCorrupt, StoreNotFound
from protocol.manifest import MANIFEST_NAME

CACHE_ENTRIES_MAX = 64
"""Copies kept on disk. A policy needs one update per learner, so this is far above what is in use."""


class EntryCache:
    """Copies below ``directory``, which several processes may share. All methods block."""

    def __init__(self, directory: Path, entries_max: int = CACHE_ENTRIES_MAX) -> None:
        """``directory`` is made when the first copy is."""
        self.directory = directory
        self._entries_max = entries_max
        self._verified: set[str] = set()

    def get(self, path: str) -> Path | None:
        """The copy of ``path``, if there is a good one. Each is verified once per process."""
        target = self.directory / path
        try:
            if path not in self._verified:
                verify_entry(target, path)
                self._verified.add(path)
            os.utime(target / MANIFEST_NAME)
        except (StoreNotFound, StoreCorrupt, FileNotFoundError, NotADirectoryError):
            self._verified.discard(path)
            return None
        return target

    def admit(self, path: str, fill: Callable[[Path], None]) -> Path:
        """Let ``fill`` write a copy into an empty directory, verify it, then move it to its place.

        Raises what ``fill`` raises, StoreNotFound or StoreCorrupt; then a good copy that was there
        before is still there, and nothing else is.
        """
        with staging(self.directory) as stage:
            fill(stage)
            verify_entry(stage, path)
            if not install(stage, self.directory, path) and self.get(path) is None:
                self._remove(path)
                install(stage, self.directory, path)
        self._verified.add(path)
        self._evict(path)
        return self.directory / path

    def forget(self, path: str) -> None:
        """Remove the copy of ``path``, if there is one."""
        self._remove(path)

    def _evict(self, newest: str) -> None:
        sweep_staging(self.directory)
        ages: list[tuple[float, str]] = []
        for path in entries_below(self.directory, self.directory):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                ages.append(((self.directory / path / MANIFEST_NAME).stat().st_mtime, path))
        for _, path in sorted(ages, reverse=True)[self._entries_max :]:
            if path != newest:
                self._remove(path)

    def _remove(self, path: str) -> None:
        self._verified.discard(path)
        entry = self.directory / path
        if entry.exists():
            with staging(self.directory) as trash, contextlib.suppress(FileNotFoundError):
                entry.rename(trash)
