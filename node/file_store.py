"""The adapter store in a shared directory: ``file:///…``.

Needs a POSIX file system on which a directory is renamed in one step: a local disk or NFS.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from node.entry_cache import EntryCache
from node.entry_files import (
    checked_content,
    checked_path,
    clear_remains,
    copy_entry,
    entries_below,
    install,
    read_manifest,
    staging,
    sweep_staging,
    verify_entry,
    write_entry,
)
from node.off_loop import OffLoop
from protocol.errors import StoreConflict, StoreDenied, StoreError, StoreUnavailable
from protocol.manifest import MANIFEST_NAME, Manifest

T = TypeVar("T")

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EXDEV})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileStore:
    """An ``AdapterStore`` (``protocol/ports.py``) over a directory that all peers can reach."""

    def __init__(
        self, root: Path, cache: EntryCache, timeout_s: float, off_loop: OffLoop | None = None
    ) -> None:
        """``root`` must exist by the first call: an unmounted disk must not be written under."""
        self._root = root
        self._cache = cache
        self._timeout_s = timeout_s
        self._off_loop = off_loop or OffLoop("file-store")

    async def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write an entry once; see the port."""
        await self._run(manifest.path, lambda: self._publish(manifest, files))

    async def fetch(self, path: str) -> Path:
        """A verified local copy; see the port."""
        return await self._run(path, lambda: self._fetch(checked_path(path)))

    async def manifest(self, path: str) -> Manifest:
        """The verified manifest alone, of the local copy if there is one; see the port."""
        return await self._run(path, lambda: self._manifest(checked_path(path)))

    async def list(self, prefix: str) -> Sequence[str]:
        """Paths of complete entries strictly below ``prefix``; see the port."""
        return await self._run(prefix, lambda: self._list(prefix))

    async def delete(self, path: str) -> None:
        """Remove an entry, manifest first; see the port."""
        await self._run(path, lambda: self._delete(path))

    async def _run(self, path: str, call: Callable[[], T]) -> T:
        def translated() -> T:
            try:
                return call()
            except OSError as exc:
                raise self._translate(exc, path) from exc

        try:
            return await self._off_loop.run(translated, self._timeout_s)
        except TimeoutError as exc:
            raise StoreUnavailable(f"{path}: {self._root} did not answer in {self._timeout_s:g} s") from exc

    def _existing_root(self) -> Path:
        if not self._root.is_dir():
            raise StoreDenied(f"the store {self._root} is no directory; create it, or mount it")
        return self._root

    def _below_root(self, path: str) -> Path:
        return self._existing_root() / checked_path(path)

    def _publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        content = checked_content(manifest, files)
        target = self._below_root(manifest.path)
        for parent in (self._root / up for up in target.relative_to(self._root).parents):
            if (parent / MANIFEST_NAME).exists():
                raise StoreConflict(f"{manifest.path} lies inside another entry; entries do not nest")
        if not (target / MANIFEST_NAME).exists():
            sweep_staging(self._root)
            with staging(self._root) as stage:
                write_entry(stage, content, files)
                install(stage, self._root, manifest.path)
        if verify_entry(target, manifest.path).to_json() != content:
            raise StoreConflict(
                f"{manifest.path}: something else was published there; a path is written once"
            )

    def _fetch(self, path: str) -> Path:
        copy = self._cache.get(path)
        if copy is not None:
            return copy
        source = self._below_root(path)
        read_manifest(source, path)
        return self._cache.admit(path, lambda stage: copy_entry(source, stage, path))

    def _manifest(self, path: str) -> Manifest:
        copy = self._cache.get(path)
        return read_manifest(copy or self._below_root(path), path)

    def _list(self, prefix: str) -> Sequence[str]:
        root = self._existing_root()
        return entries_below(root, root / checked_path(prefix) if prefix else root)

    def _delete(self, path: str) -> None:
        target = self._below_root(path)
        self._cache.forget(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (target / MANIFEST_NAME).unlink()
            clear_remains(target, path)
            target.rmdir()

    def _translate(self, exc: OSError, path: str) -> StoreError:
        what = f"{path}: {exc.strerror or exc} in the store {self._root}"
        if exc.errno in _DENIED:
            return StoreDenied(f"{what}; this node may not use it so")
        if exc.errno in _FULL:
            return StoreUnavailable(f"{what}; free some space")
        return StoreUnavailable(what)
