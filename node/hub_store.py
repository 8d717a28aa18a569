"""The adapter store in a bucket of the Hub: ``hf://buckets/<namespace>/<bucket>[/prefix]``.

A batch of files is no transaction there, a file is visible when it is, downloads are written in place, and
nothing compares and sets. So the manifest goes in a batch of its own after the Hub has shown the data, and
what this node uses is verified in its cache. Who of two writers wins a path at one moment the Hub cannot
tell; heads are decided by the broker (``docs/hub.md``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hf_xet import hash_files
from huggingface_hub import BucketFile, HfApi

from node.entry_cache import EntryCache
from node.entry_files import (
    MANIFEST_BYTES_MAX,
    checked_content,
    checked_path,
    is_path,
    read_manifest,
    staging,
    sweep_staging,
)
from node.hub_calls import HubCalls
from node.off_loop import OffLoop
from node.own_disk import OwnDisk
from node.patience import Patience
from protocol.errors import StoreConflict, StoreCorrupt, StoreNotFound, StoreUnavailable
from protocol.manifest import MANIFEST_NAME, Manifest

Additions = list[tuple[str | Path | bytes, str]]
"""Files or their content, and where each goes in the bucket."""

LOOK_S = 0.1
"""Pause before the Hub is asked a second time whether it shows what was uploaded."""

LOOKS_AT_FOREIGN = 4
"""Looks after which other content under a path is a conflict and not yesterday's listing."""


@dataclass(frozen=True, slots=True)
class Staged:
    """An entry on its way: its files on this disk, and the Hub's hash of each by name."""

    directory: Path
    hashes: Mapping[str, str]

    def part(self, names: Sequence[str], at: str) -> Additions:
        """Files to add below ``at``."""
        return [(self.directory / name, f"{at}/{name}") for name in names]


class HubStore:
    """An ``AdapterStore`` (``protocol/ports.py``) over one bucket."""

    def __init__(
        self,
        calls: HubCalls,
        prefix: str,
        cache_dir: Path,
        timeout_s: float,
        off_loop: OffLoop | None = None,
    ) -> None:
        """``prefix`` is a directory of the bucket, or empty; ``cache_dir`` holds this node's copies."""
        self._calls = calls
        self._prefix = f"{prefix}/" if prefix else ""
        self._cache_dir = cache_dir
        self._cache = EntryCache(cache_dir)
        self._timeout_s = timeout_s
        self._disk = OwnDisk(cache_dir, timeout_s, off_loop or OffLoop("hub-store"))

    async def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write an entry once; see the port. Other content by a writer of the same moment may go unnoticed
        only if its data are the same and its manifest is not."""
        patience = self._calls.patience(self._timeout_s)
        with contextlib.ExitStack() as stack:
            staged = await self._disk.run(lambda: self._staged(manifest, files, stack))
            await self._publish(patience, manifest.path, staged)

    async def fetch(self, path: str) -> Path:
        """A verified local copy; see the port."""
        checked_path(path)
        copy = await self._disk.run(lambda: self._cache.get(path))
        if copy is not None:
            return copy

        def download(api: HfApi) -> Path:
            return self._cache.admit(path, lambda stage: self._download(api, path, stage))

        return await self._calls.move(self._calls.patience(self._timeout_s), download, "read")

    async def manifest(self, path: str) -> Manifest:
        """The verified manifest alone, of the local copy if there is one; see the port."""
        checked_path(path)
        copy = await self._disk.run(lambda: self._cache.get(path))
        if copy is not None:
            return await self._disk.run(lambda: read_manifest(copy, path))

        def download(api: HfApi) -> Manifest:
            with staging(self._cache_dir) as stage:
                return self._download_manifest(api, path, stage, self._listed(api, path))

        return await self._calls.move(self._calls.patience(self._timeout_s), download, "read")

    async def list(self, prefix: str) -> Sequence[str]:
        """Paths of complete entries strictly below ``prefix``; see the port."""
        top = checked_path(prefix) if prefix else ""

        def entries(api: HfApi) -> Sequence[str]:
            names = (path.rpartition("/") for path in self._below(api, top))
            found = (path for path, _, name in names if name == MANIFEST_NAME and path != top)
            return sorted(path for path in found if is_path(path))

        return await self._calls.ask(self._calls.patience(self._timeout_s), entries)

    async def delete(self, path: str) -> None:
        """Remove an entry, manifest first; see the port. What a crash left there goes too."""
        checked_path(path)
        patience = self._calls.patience(self._timeout_s)
        await self._disk.run(lambda: self._cache.forget(path))
        there = await self._calls.ask(patience, lambda api: self._listed(api, path))
        parts = ([MANIFEST_NAME], [name for name in there if name != MANIFEST_NAME])
        for names in parts:
            gone = [self._at(f"{path}/{name}") for name in names if name in there]
            if gone:
                await self._calls.ask(patience, partial(self._batch, delete=gone))

    async def _publish(self, patience: Patience, path: str, staged: Staged) -> None:
        there = await self._calls.ask(patience, lambda api: self._place(api, path))
        ours, at = staged.hashes, self._at(path)
        if MANIFEST_NAME in there and there[MANIFEST_NAME] != ours[MANIFEST_NAME]:
            raise _conflict(path)
        data = [name for name in ours if name != MANIFEST_NAME]
        new = [name for name in data if there.get(name) != ours[name]]
        left = [f"{at}/{name}" for name in there if name not in ours]
        if new or left:
            add = staged.part(new, at)
            await self._calls.move(patience, lambda api: self._batch(api, add=add, delete=left), "write")
        await self._confirm(patience, path, {name: ours[name] for name in data}, ours[MANIFEST_NAME])
        if MANIFEST_NAME not in there:
            last = staged.part([MANIFEST_NAME], at)
            await self._calls.move(patience, lambda api: self._batch(api, add=last), "write")
        await self._confirm(patience, path, ours, ours[MANIFEST_NAME])

    async def _confirm(
        self, patience: Patience, path: str, expected: Mapping[str, str], manifest: str
    ) -> None:
        """Wait until the Hub shows ``expected``, and no manifest but the one with hash ``manifest``."""
        between = Patience(patience.left_s, LOOK_S)
        names = {self._at(f"{path}/{name}"): name for name in (*expected, MANIFEST_NAME)}
        wanted = {MANIFEST_NAME: manifest, **expected}

        def look(api: HfApi) -> dict[str, str]:
            infos = api.get_bucket_paths_info(self._calls.bucket, [*names])
            return {names[info.path]: info.xet_hash for info in infos}

        for looks in itertools.count(1):
            shown = await self._calls.ask(patience, look)
            foreign = [name for name, found in shown.items() if found != wanted[name]]
            missing = [name for name in expected if name not in shown]
            if not foreign and not missing:
                return
            if foreign and looks >= LOOKS_AT_FOREIGN:
                raise _conflict(path)
            if not await between.pause():
                raise StoreUnavailable(f"{path}: the Hub does not show {(foreign + missing)[0]} yet")

    def _staged(self, manifest: Manifest, files: Mapping[str, bytes], stack: contextlib.ExitStack) -> Staged:
        content = checked_content(manifest, files)
        sweep_staging(self._cache_dir)
        directory = stack.enter_context(staging(self._cache_dir))
        contents = {**files, MANIFEST_NAME: content}
        for name, data in contents.items():
            (directory / name).write_bytes(data)
        found = hash_files([str(directory / name) for name in contents])
        return Staged(directory, {name: info.hash for name, info in zip(contents, found, strict=True)})

    def _place(self, api: HfApi, path: str) -> dict[str, str]:
        """Hashes of what lies at ``path`` by name; raises StoreConflict where entries would nest."""
        above = itertools.accumulate(path.split("/")[:-1], lambda up, name: f"{up}/{name}")
        manifests = [self._at(f"{up}/{MANIFEST_NAME}") for up in above]
        if manifests and any(True for _ in api.get_bucket_paths_info(self._calls.bucket, manifests)):
            raise StoreConflict(f"{path} lies inside another entry; entries do not nest")
        there = {}
        for found, file in self._below(api, path).items():
            name = found.removeprefix(f"{path}/")
            if "/" in name:
                raise StoreConflict(f"{path} is a directory of entries; entries do not nest")
            there[name] = file.xet_hash
        return there

    def _listed(self, api: HfApi, path: str) -> dict[str, BucketFile]:
        """What lies at ``path``, by name."""
        found = {at.removeprefix(f"{path}/"): file for at, file in self._below(api, path).items()}
        return {name: file for name, file in found.items() if "/" not in name}

    def _below(self, api: HfApi, path: str) -> dict[str, BucketFile]:
        """Files below directory ``path`` of the store, by path. The Hub compares letters: asked for ``a/1``
        it also finds ``a/10``."""
        top = self._at(f"{path}/") if path else self._prefix
        tree = api.list_bucket_tree(self._calls.bucket, top.rstrip("/") or None, recursive=True)
        files = (item for item in tree if isinstance(item, BucketFile) and item.path.startswith(top))
        return {file.path.removeprefix(self._prefix): file for file in files}

    def _download(self, api: HfApi, path: str, stage: Path) -> None:
        """The manifest and exactly the files it lists."""
        there = self._listed(api, path)
        manifest = self._download_manifest(api, path, stage, there)
        for info in manifest.files:
            if info.name not in there:
                raise StoreCorrupt(f"{path}: {info.name} is missing")
            if there[info.name].size != info.size:
                size = there[info.name].size
                raise StoreCorrupt(f"{path}: {info.name} has {size} bytes, not {info.size}")
        self._download_files(api, [there[info.name] for info in manifest.files], stage)

    def _download_manifest(
        self, api: HfApi, path: str, stage: Path, there: Mapping[str, BucketFile]
    ) -> Manifest:
        file = there.get(MANIFEST_NAME)
        if file is None:
            raise StoreNotFound(f"{path}: nothing complete there")
        if file.size > MANIFEST_BYTES_MAX:
            raise StoreCorrupt(f"{path}: a manifest of {file.size} bytes")
        self._download_files(api, [file], stage)
        return read_manifest(stage, path)

    def _download_files(self, api: HfApi, files: Sequence[BucketFile], stage: Path) -> None:
        pairs: list[tuple[str | BucketFile, str | Path]] = []
        pairs += [(file, stage / file.path.rpartition("/")[2]) for file in files]
        api.download_bucket_files(self._calls.bucket, pairs, raise_on_missing_files=True)
        for file, (_, target) in zip(files, pairs, strict=True):
            size = Path(target).stat().st_size
            if size != file.size:
                raise StoreUnavailable(f"{file.path}: {size} of {file.size} bytes arrived")

    def _batch(
        self,
        api: HfApi,
        add: Additions | None = None,
        delete: Sequence[str] | None = None,
    ) -> None:
        api.batch_bucket_files(self._calls.bucket, add=add, delete=[*(delete or ())])

    def _at(self, path: str) -> str:
        """Where ``path`` of the store lies in the bucket."""
        return f"{self._prefix}{path}"


def _conflict(path: str) -> StoreConflict:
    return StoreConflict(f"{path}: something else was published there; a path is written once")
