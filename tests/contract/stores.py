"""The stores under contract, each with a back door: what a crash, a disk or a stranger may do to it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from node.entry_cache import EntryCache
from node.file_store import FileStore
from node.memory_store import MemoryBucket, MemoryStore
from node.system_clock import SystemClock
from protocol.ports import AdapterStore


class World(Protocol):
    """One store that several nodes share."""

    def node(self, name: str | None = None) -> AdapterStore:
        """The store as a node sees it when it starts. The copies of a named node outlive it."""
        ...

    def write(self, path: str, name: str, data: bytes) -> None:
        """Put bytes where a file of an entry lies, past every rule."""
        ...

    def read(self, path: str, name: str) -> bytes:
        """What lies there."""
        ...

    def remove(self, path: str, name: str) -> None:
        """Take a file away."""
        ...


def cache_of(directory: Path, name: str | None) -> Path:
    """Where a node keeps its copies; a node without a name starts with none."""
    return directory / f"cache-{name or uuid.uuid4().hex}"


class FileWorld:
    """A shared directory."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "store"
        self.root.mkdir()
        self._directory = directory

    def node(self, name: str | None = None) -> FileStore:
        return FileStore(self.root, EntryCache(cache_of(self._directory, name)), timeout_s=10)

    def write(self, path: str, name: str, data: bytes) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)
        (self.root / path / name).write_bytes(data)

    def read(self, path: str, name: str) -> bytes:
        return (self.root / path / name).read_bytes()

    def remove(self, path: str, name: str) -> None:
        (self.root / path / name).unlink()


class MemoryWorld:
    """A bucket in memory."""

    def __init__(self, directory: Path) -> None:
        self._bucket = MemoryBucket()
        self._directory = directory

    def node(self, name: str | None = None) -> MemoryStore:
        cache = EntryCache(cache_of(self._directory, name))
        return MemoryStore(self._bucket, cache, SystemClock())

    def write(self, path: str, name: str, data: bytes) -> None:
        self._bucket.entries.setdefault(path, {})[name] = data

    def read(self, path: str, name: str) -> bytes:
        return self._bucket.entries[path][name]

    def remove(self, path: str, name: str) -> None:
        del self._bucket.entries[path][name]


WORLDS: dict[str, Callable[[Path], World]] = {"file": FileWorld, "memory": MemoryWorld}
