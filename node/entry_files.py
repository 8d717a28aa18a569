"""An entry of the store as a directory: staged, moved in one step, verified before it is believed.

A directory is an entry when it holds ``manifest.json``. Because a whole directory is renamed, an entry
is either there or not; files without a manifest are what a crash, a deletion or another tool left.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from protocol.errors import StoreConflict, StoreCorrupt, StoreNotFound, StoreUnavailable
from protocol.manifest import MANIFEST_NAME, FileInfo, Manifest
from protocol.messages import StorePath

STAGING = ".staging"
"""Where entries are written before they are moved; no store path can begin with a dot."""

STAGING_LIFETIME_S = 24 * 3600
"""A staged entry older than this was left by a crash."""

MANIFEST_BYTES_MAX = 16 << 20
"""A manifest names the groups of one update; a larger one is no manifest."""

INSTALL_TRIES_MAX = 10
"""Each try removes remains; more than a few means that somebody else keeps putting them there."""

FILE_NAME_MAX = 255
"""Characters of one segment of a path, on every common file system."""

_STORE_PATH: TypeAdapter[str] = TypeAdapter(StorePath)


def checked_path(path: str) -> str:
    """``path`` if it is a store path, which cannot leave the root; raises StoreNotFound."""
    try:
        checked = _STORE_PATH.validate_python(path)
    except ValidationError as exc:
        raise StoreNotFound(f"{path!r} is not a path of a store") from exc
    if max(map(len, checked.split("/"))) > FILE_NAME_MAX:
        raise StoreNotFound(f"{path!r} is not a path that a file system can have")
    return checked


def is_path(path: str) -> bool:
    """Whether an entry can have this path; people and other tools put other things beside entries."""
    try:
        checked_path(path)
    except StoreNotFound:
        return False
    return True


def checked_content(manifest: Manifest, files: Mapping[str, bytes]) -> bytes:
    """The content of ``manifest.json``; raises StoreCorrupt unless it is signed and describes ``files``."""
    content = manifest.to_json()
    Manifest.from_json(content, manifest.path)
    if Manifest.describe(files) != manifest.files:
        raise StoreCorrupt(f"{manifest.path}: the manifest does not describe the files to publish")
    return content


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A new directory below ``root``, on the same file system; gone afterwards unless it was moved."""
    directory = root / STAGING / uuid.uuid4().hex
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def sweep_staging(root: Path) -> None:
    """Remove what crashed writers left long ago."""
    for directory in (root / STAGING).glob("*"):
        with contextlib.suppress(FileNotFoundError):  # its writer finished just now
            if time.time() - directory.stat().st_mtime > STAGING_LIFETIME_S:
                shutil.rmtree(directory, ignore_errors=True)


def entries_below(root: Path, start: Path) -> list[str]:
    """Paths, from ``root``, of the directories strictly below ``start`` that hold a manifest; sorted."""
    found = []
    for directory, folders, names in os.walk(start):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if MANIFEST_NAME in names and Path(directory) != start:
            found.append(Path(directory).relative_to(root).as_posix())
    return sorted(found)


def write_entry(directory: Path, content: bytes, files: Mapping[str, bytes]) -> None:
    """Write the data, then ``content`` as the manifest, each on the disk before the next."""
    for name, data in files.items():
        _write_file(directory / name, data)
    _write_file(directory / MANIFEST_NAME, content)
    _sync_directory(directory)


def install(stage: Path, root: Path, path: str) -> bool:
    """Move ``stage`` to ``path`` in one step; False if a complete entry is there already.

    Raises StoreConflict if ``path`` is a directory of entries: entries do not nest.
    """
    target = root / path
    for _ in range(INSTALL_TRIES_MAX):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(stage, target)  # noqa: PTH104 Path.rename would hide that this must not replace
        except OSError as exc:
            if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            if (target / MANIFEST_NAME).exists():
                return False
            clear_remains(target, path)
        else:
            for parent in target.relative_to(root).parents:
                _sync_directory(root / parent)
            return True
    raise StoreUnavailable(f"{path}: another tool keeps writing there")


def clear_remains(target: Path, path: str) -> None:
    """Empty a directory that is no entry. Safe against an entry that is moved there meanwhile.

    Files are removed through the open directory. A new entry is another directory under the same
    name, so that what is removed can only be the remains.
    """
    with contextlib.suppress(FileNotFoundError):
        remains = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
        try:
            names = os.listdir(remains)  # noqa: PTH208 a Path cannot hold an open directory
            if MANIFEST_NAME in names:
                return
            for name in names:
                if stat.S_ISDIR(os.stat(name, dir_fd=remains, follow_symlinks=False).st_mode):
                    raise StoreConflict(f"{path} is a directory of entries; entries do not nest")
                os.unlink(name, dir_fd=remains)
        finally:
            os.close(remains)


def read_manifest(directory: Path, path: str) -> Manifest:
    """The verified manifest in ``directory``; raises StoreNotFound, StoreCorrupt."""
    file = directory / MANIFEST_NAME
    try:
        if file.lstat().st_size > MANIFEST_BYTES_MAX:
            raise StoreCorrupt(f"{path}: a manifest of {file.lstat().st_size} bytes")
        _expect_regular(file, path)
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise StoreNotFound(f"{path}: nothing complete there") from exc
    return Manifest.from_json(content, path)


def verify_entry(directory: Path, path: str) -> Manifest:
    """The manifest, once each file has the size and sha256 it promises; raises like ``read_manifest``."""
    manifest = read_manifest(directory, path)
    for info in manifest.files:
        _verify_file(directory / info.name, info, path)
    return manifest


def copy_entry(source: Path, directory: Path, path: str) -> None:
    """Copy a manifest and exactly the files it lists; raises StoreNotFound, StoreCorrupt."""
    manifest = read_manifest(source, path)
    for info in manifest.files:
        file = source / info.name
        try:
            _expect_regular(file, path)
            if file.stat().st_size != info.size:
                raise StoreCorrupt(f"{path}: {info.name} has {file.stat().st_size} bytes, not {info.size}")
            shutil.copyfile(file, directory / info.name)
        except FileNotFoundError as exc:
            if not (source / MANIFEST_NAME).exists():
                raise StoreNotFound(f"{path}: was removed meanwhile") from exc
            raise StoreCorrupt(f"{path}: {info.name} is missing") from exc
    (directory / MANIFEST_NAME).write_bytes(manifest.to_json())


def _verify_file(file: Path, info: FileInfo, path: str) -> None:
    try:
        _expect_regular(file, path)
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != info.size:
                raise StoreCorrupt(f"{path}: {info.name} has {size} bytes, not {info.size}")
            if hashlib.file_digest(opened, "sha256").hexdigest() != info.sha256:
                raise StoreCorrupt(f"{path}: {info.name} has another sha256 than its manifest says")
    except FileNotFoundError as exc:
        raise StoreCorrupt(f"{path}: {info.name} is missing") from exc


def _expect_regular(file: Path, path: str) -> None:
    if not stat.S_ISREG(file.lstat().st_mode):
        raise StoreCorrupt(f"{path}: {file.name} is not a regular file")


def _write_file(file: Path, data: bytes) -> None:
    with file.open("xb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def _sync_directory(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
