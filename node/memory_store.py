"""The adapter store in memory: for tests and simulations, with faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from node.entry_cache import EntryCache
from node.entry_files import checked_content, checked_path
from protocol.errors import StoreConflict, StoreCorrupt, StoreDenied, StoreNotFound, StoreUnavailable
from protocol.manifest import MANIFEST_NAME, Manifest
from protocol.ports import Clock

Operation = Literal["publish", "fetch", "manifest", "list", "delete"]


class StoreFault(StrEnum):
    """What can go wrong with one call."""

    SLOW = "slow"
    """The call takes half its deadline, then succeeds."""
    HANGING = "hanging"
    """The call takes its whole deadline and has no effect."""
    UNAVAILABLE = "unavailable"
    """The call fails at once and has no effect."""
    DENIED = "denied"
    """The call is not allowed: a disk made read-only, a token that expired."""
    MISSING = "missing"
    """A published entry cannot be seen yet."""
    TORN = "torn"
    """Publishing ends between data and manifest; fetching gets a file that is one byte short."""
    CORRUPT = "corrupt"
    """Fetching gets a file with one bit flipped."""
    LOST_ACK = "lost_ack"
    """The call takes effect, and its caller learns nothing of it."""


Faults = Callable[[Operation, str], StoreFault | None]
"""Asked at each call with the operation and the path: what goes wrong with this one?"""


def no_faults(operation: Operation, path: str) -> None:
    """All is well."""


@dataclass
class MemoryBucket:
    """What all peers of a simulation share: files by entry and name."""

    entries: dict[str, dict[str, bytes]] = field(default_factory=dict)


class MemoryStore:
    """An ``AdapterStore`` (``protocol/ports.py``) as one node sees it; local copies are real files."""

    def __init__(
        self,
        bucket: MemoryBucket,
        cache: EntryCache,
        clock: Clock,
        *,
        timeout_s: float = 10.0,
        faults: Faults = no_faults,
    ) -> None:
        """``clock`` makes slow calls take time; ``faults`` says which calls fail, and how."""
        self._entries = bucket.entries
        self._cache = cache
        self._clock = clock
        self._timeout_s = timeout_s
        self._faults = faults

    async def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write an entry once; see the port."""
        content = checked_content(manifest, files)
        path = manifest.path
        fault = await self._fault("publish", path)
        if any(_below(path, other) or _below(other, path) for other in self._entries):
            raise StoreConflict(f"{path} lies inside or around another entry; entries do not nest")
        if MANIFEST_NAME not in self._entries.get(path, {}):
            self._entries[path] = dict(files)
            if fault is StoreFault.TORN:
                raise StoreUnavailable(f"{path}: crashed before the manifest")
            self._entries[path][MANIFEST_NAME] = content
        if self._entries[path] != {**files, MANIFEST_NAME: content}:
            self._verified(path)
            raise StoreConflict(f"{path}: something else was published there; a path is written once")
        self._lose_ack(fault, path)

    async def fetch(self, path: str) -> Path:
        """A verified local copy; see the port."""
        fault = await self._fault("fetch", checked_path(path))
        copy = self._cache.get(path)
        if copy is not None:
            return copy
        manifest = self._verified(path, fault)
        return self._cache.admit(path, lambda stage: self._write_copy(stage, manifest, fault))

    async def manifest(self, path: str) -> Manifest:
        """The verified manifest alone; see the port."""
        fault = await self._fault("manifest", checked_path(path))
        return self._verified(path, fault)

    async def list(self, prefix: str) -> Sequence[str]:
        """Paths of complete entries strictly below ``prefix``; see the port."""
        await self._fault("list", checked_path(prefix) if prefix else prefix)
        complete = (path for path, files in self._entries.items() if MANIFEST_NAME in files)
        return sorted(path for path in complete if not prefix or _below(path, prefix))

    async def delete(self, path: str) -> None:
        """Remove an entry; see the port."""
        fault = await self._fault("delete", checked_path(path))
        self._cache.forget(path)
        if MANIFEST_NAME in self._entries.get(path, {}):
            del self._entries[path]
        self._lose_ack(fault, path)

    async def _fault(self, operation: Operation, path: str) -> StoreFault | None:
        fault = self._faults(operation, path)
        if fault is StoreFault.SLOW:
            await self._clock.sleep(self._timeout_s / 2)
        elif fault is StoreFault.HANGING:
            await self._clock.sleep(self._timeout_s)
            raise StoreUnavailable(f"{path}: the store did not answer in {self._timeout_s:g} s")
        elif fault is StoreFault.UNAVAILABLE:
            raise StoreUnavailable(f"{path}: the store is not available")
        elif fault is StoreFault.DENIED:
            raise StoreDenied(f"{path}: the store does not allow it")
        return fault

    def _verified(self, path: str, fault: StoreFault | None = None) -> Manifest:
        content = self._entries.get(path, {}).get(MANIFEST_NAME)
        if content is None or fault is StoreFault.MISSING:
            raise StoreNotFound(f"{path}: nothing complete there")
        return Manifest.from_json(content, path)

    def _write_copy(self, stage: Path, manifest: Manifest, fault: StoreFault | None) -> None:
        entry = self._entries[manifest.path]
        for info in manifest.files:
            if info.name not in entry:
                raise StoreCorrupt(f"{manifest.path}: {info.name} is missing")
            data = entry[info.name]
            if fault is StoreFault.TORN:
                data = data[:-1]
            elif fault is StoreFault.CORRUPT and data:
                data = bytes([data[0] ^ 1]) + data[1:]
            (stage / info.name).write_bytes(data)
        (stage / MANIFEST_NAME).write_bytes(entry[MANIFEST_NAME])

    def _lose_ack(self, fault: StoreFault | None, path: str) -> None:
        if fault is StoreFault.LOST_ACK:
            raise StoreUnavailable(f"{path}: the connection broke before the answer")


def _below(path: str, directory: str) -> bool:
    return path.startswith(f"{directory}/")
