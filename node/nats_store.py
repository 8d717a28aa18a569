"""The adapter store in the run's own broker: ``nats://``, for people with no account and no shared disk.

All names of an entry, its manifest's among them, are written in one atomic batch after their contents. So an
entry is there or not, and of two writers the broker lets one win. What the broker loses with its disk is
lost: ``recover`` needs another store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from node.entry_cache import EntryCache
from node.entry_files import MANIFEST_BYTES_MAX, checked_content, checked_path, is_path, read_manifest
from node.nats_objects import Content, ObjectInfo, Objects
from node.off_loop import OffLoop
from node.own_disk import OwnDisk
from node.patience import Patience
from protocol.errors import (
    BackPressure,
    BrokerAbsent,
    BusError,
    MessageTooLarge,
    StoreConflict,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreNotFound,
    StoreUnavailable,
    UnknownOutcome,
    WrongRevision,
)
from protocol.manifest import MANIFEST_NAME, FileInfo, Manifest

T = TypeVar("T")

_NO_STREAM = "(10059)"

log = structlog.get_logger("nats")


class NatsStore:
    """An ``AdapterStore`` (``protocol/ports.py``) over one Object Store bucket."""

    def __init__(
        self, objects: Objects, cache: EntryCache, timeout_s: float, off_loop: OffLoop | None = None
    ) -> None:
        """``cache`` holds this node's copies."""
        self._objects = objects
        self._cache = cache
        self._timeout_s = timeout_s
        self._disk = OwnDisk(cache.directory, timeout_s, off_loop or OffLoop("nats-store"))

    async def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write an entry once; see the port."""
        content = await self._disk.run(lambda: checked_content(manifest, files))
        await self._repeat(manifest.path, lambda: self._publish(manifest, {**files, MANIFEST_NAME: content}))

    async def fetch(self, path: str) -> Path:
        """A verified local copy; see the port."""
        checked_path(path)
        copy = await self._disk.run(lambda: self._cache.get(path))
        return copy if copy is not None else await self._repeat(path, lambda: self._fetch(path))

    async def manifest(self, path: str) -> Manifest:
        """The verified manifest alone, of the local copy if there is one; see the port."""
        checked_path(path)
        copy = await self._disk.run(lambda: self._cache.get(path))
        if copy is not None:
            return await self._disk.run(lambda: read_manifest(copy, path))
        return Manifest.from_json(await self._repeat(path, lambda: self._content(path)), path)

    async def list(self, prefix: str) -> Sequence[str]:
        """Paths of complete entries strictly below ``prefix``; see the port."""
        top = f"{checked_path(prefix)}/" if prefix else ""
        return await self._repeat(prefix or "/", lambda: self._list(top))

    async def delete(self, path: str) -> None:
        """Remove an entry, manifest first; see the port. What a crash left there goes too."""
        checked_path(path)
        await self._disk.run(lambda: self._cache.forget(path))
        await self._repeat(path, lambda: self._delete(path))

    async def _publish(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        path = manifest.path
        await self._refuse_nesting(path)
        last = f"{path}/{MANIFEST_NAME}"
        there, revision = await self._objects.look_at(last)
        if there is not None:
            await self._settle(manifest, contents[MANIFEST_NAME])
            return
        stored: dict[str, Content] = {}
        try:
            for name, data in contents.items():
                stored[f"{path}/{name}"] = await self._objects.put(data)
            await self._objects.name_all(stored, last, revision)
        except UnknownOutcome:
            raise  # they may have their names by now; the next try finds out
        except WrongRevision:
            await self._remove(stored)
            await self._settle(manifest, contents[MANIFEST_NAME])
            return
        except (BusError, MessageTooLarge):
            await self._remove(stored)
            raise
        left = [name for name in await self._names_at(path) if name not in stored]
        for info in (await self._objects.look(left)).values():
            await self._objects.remove(info)

    async def _settle(self, manifest: Manifest, content: bytes) -> None:
        """Whether what lies there is what was to be published. Raises StoreConflict, StoreCorrupt."""
        path = manifest.path
        if await self._content(path) != content:
            Manifest.from_json(await self._content(path), path)
            raise StoreConflict(f"{path}: something else was published there; a path is written once")
        for info, stored in (await self._listed(manifest)).items():
            if stored.content.sha256 != info.sha256:
                raise StoreCorrupt(f"{path}: {info.name} has another sha256 than its manifest says")

    async def _remove(self, stored: Mapping[str, Content]) -> None:
        """Take away contents that got no name; best effort."""
        for content in stored.values():
            await self._objects.forget(content)

    async def _refuse_nesting(self, path: str) -> None:
        others = []
        for name in await self._objects.names():
            entry, _, file = name.rpartition("/")
            if file == MANIFEST_NAME and (entry.startswith(f"{path}/") or path.startswith(f"{entry}/")):
                others.append(name)
        if others and await self._objects.look(others):
            raise StoreConflict(f"{path} lies inside or around another entry; entries do not nest")

    async def _fetch(self, path: str) -> Path:
        content = await self._content(path)
        manifest = Manifest.from_json(content, path)
        contents = {MANIFEST_NAME: content}
        for info, stored in (await self._listed(manifest)).items():
            data = await self._objects.get(stored.content)
            if data is None:
                raise await self._gone(path, f"the content of {info.name} is damaged")
            contents[info.name] = data

        def fill(stage: Path) -> None:
            for name, data in contents.items():
                (stage / name).write_bytes(data)

        return await self._disk.run(lambda: self._cache.admit(path, fill))

    async def _content(self, path: str) -> bytes:
        """The content of the manifest, unread. Raises StoreNotFound, StoreCorrupt."""
        there, _ = await self._objects.look_at(f"{path}/{MANIFEST_NAME}")
        if there is None:
            raise StoreNotFound(f"{path}: nothing complete there")
        if there.size > MANIFEST_BYTES_MAX:
            raise StoreCorrupt(f"{path}: a manifest of {there.size} bytes")
        content = await self._objects.get(there.content)
        if content is None:
            raise await self._gone(path, "the content of the manifest is damaged")
        return content

    async def _listed(self, manifest: Manifest) -> dict[FileInfo, ObjectInfo]:
        """The objects of the files that a manifest lists, of the sizes it says."""
        path = manifest.path
        found = await self._objects.look([f"{path}/{info.name}" for info in manifest.files])
        listed = {}
        for info in manifest.files:
            stored = found.get(f"{path}/{info.name}")
            if stored is None:
                raise await self._gone(path, f"{info.name} is missing")
            if stored.size != info.size:
                raise StoreCorrupt(f"{path}: {info.name} has {stored.size} bytes, not {info.size}")
            listed[info] = stored
        return listed

    async def _gone(self, path: str, what: str) -> StoreError:
        """Why a file of an entry cannot be had: it is being deleted, or damaged."""
        there, _ = await self._objects.look_at(f"{path}/{MANIFEST_NAME}")
        return (
            StoreNotFound(f"{path}: was removed meanwhile")
            if there is None
            else StoreCorrupt(f"{path}: {what}")
        )

    async def _list(self, top: str) -> Sequence[str]:
        suffix = f"/{MANIFEST_NAME}"
        names = [name for name in await self._objects.names() if name.endswith(suffix)]
        below = [name for name in names if name.startswith(top) and name != f"{top}{MANIFEST_NAME}"]
        found = (name.removesuffix(suffix) for name in await self._objects.look(below))
        return sorted(filter(is_path, found))

    async def _names_at(self, path: str) -> Sequence[str]:
        return [name for name in await self._objects.names() if name.rpartition("/")[0] == path]

    async def _delete(self, path: str) -> None:
        there = await self._objects.look(await self._names_at(path))
        for name in sorted(there, key=lambda name: not name.endswith(f"/{MANIFEST_NAME}")):
            await self._objects.remove(there[name])

    async def _repeat(self, path: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt``, which may be repeated, returns within the time there is."""
        patience = Patience(self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await attempt()
                    except (BusError, MessageTooLarge) as exc:
                        fault = _translated(path, exc)
                        log.warning("store_call_failed", path=path, error=str(fault))
                        if isinstance(fault, StoreDenied) or not await patience.pause():
                            raise fault from exc
        except TimeoutError as exc:
            text = f"{path}: the broker's object store did not answer in {self._timeout_s:g} s"
            raise StoreUnavailable(text) from exc


def _translated(path: str, exc: BusError | MessageTooLarge) -> StoreError:
    if isinstance(exc, BackPressure):
        return StoreUnavailable(f"{path}: the broker's disk is full ({exc}); raise its max_file_store")
    if isinstance(exc, MessageTooLarge):
        return StoreDenied(f"{path}: {exc}")
    if isinstance(exc, BrokerAbsent) and _NO_STREAM in str(exc):
        return StoreDenied(
            f"{path}: this broker holds no adapters of this run; create the run again (what lay in nats:// "
            "is lost with the broker's disk)"
        )
    return StoreUnavailable(f"{path}: the broker's object store: {exc}")
