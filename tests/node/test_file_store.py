"""The store in a shared directory: what only a file system can do to it."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from node.entry_cache import EntryCache
from node.entry_files import STAGING, STAGING_LIFETIME_S, clear_remains
from node.file_store import FileStore
from node.off_loop import OffLoop
from protocol.errors import StoreCorrupt, StoreDenied, StoreNotFound, StoreUnavailable
from protocol.manifest import MANIFEST_NAME
from tests.build import an_entry

PATH = "test/updates/learner-1/1-abc"
DATA = "update.safetensors"

PUBLISHER = """
import asyncio, sys
from pathlib import Path
from node.entry_cache import EntryCache
from node.file_store import FileStore
from protocol.errors import StoreConflict
from tests.build import an_entry
root, letter = Path(sys.argv[1]), sys.argv[2].encode()
store = FileStore(root, EntryCache(root / ".." / f"cache-{sys.argv[2]}"), 30)
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
for attempt in range(20):
    try:
        asyncio.run(store.publish(*an_entry(f"test/{attempt}", files={"data": letter * 30_000})))
    except StoreConflict:
        sys.stdout.write("lost ")
    else:
        sys.stdout.write("won ")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    root.mkdir()
    return root


def a_store(root: Path, off_loop: OffLoop | None = None, timeout_s: float = 10) -> FileStore:
    return FileStore(root, EntryCache(root.parent / "cache"), timeout_s, off_loop)


async def test_publishing_leaves_no_temporary_files(root: Path):
    await a_store(root).publish(*an_entry())
    await a_store(root).fetch(PATH)
    left = [path for path in root.parent.rglob("*") if path.parent.name == STAGING]
    assert left == []


async def test_published_files_can_be_read_by_other_users(root: Path):
    await a_store(root).publish(*an_entry())
    mask = os.umask(0)
    os.umask(mask)
    assert (root / PATH).stat().st_mode & 0o777 == 0o777 & ~mask


def test_two_processes_that_publish_one_path_never_mix(root: Path):
    publishers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(root), letter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for letter in "ab"
    ]
    for publisher in publishers:
        assert publisher.stdout
        assert publisher.stdout.readline() == "ready\n"
    for publisher in publishers:
        assert publisher.stdin
        publisher.stdin.write("go\n")
        publisher.stdin.flush()
    outcomes = [publisher.communicate(timeout=60)[0].split() for publisher in publishers]
    assert len(outcomes[0]) == 20
    for attempt, pair in enumerate(zip(*outcomes, strict=True)):
        assert sorted(pair) == ["lost", "won"]
        copy = asyncio.run(a_store(root).fetch(f"test/{attempt}"))
        assert (copy / "data").read_bytes() == "ab"[pair.index("won")].encode() * 30_000


async def test_a_missing_root_is_denied_and_never_created(tmp_path: Path):
    store = a_store(tmp_path / "unmounted" / "disk")
    with pytest.raises(StoreDenied, match="create it, or mount it"):
        await store.publish(*an_entry())
    for call in (store.fetch, store.manifest, store.list, store.delete):
        with pytest.raises(StoreDenied, match="create it, or mount it"):
            await call(PATH)
    assert not (tmp_path / "unmounted").exists()


async def test_a_root_that_is_a_file_is_denied(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreDenied):
        await a_store(tmp_path / "file").list("")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, StoreDenied),
        (errno.EROFS, StoreDenied),
        (errno.ENOSPC, StoreUnavailable),
        (errno.EDQUOT, StoreUnavailable),
        (errno.EIO, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
    ],
)
async def test_a_file_system_error_says_whether_to_try_again(root: Path, number: int, kind: type[Exception]):
    class Failing(EntryCache):
        def get(self, path: str) -> Path | None:
            raise OSError(number, os.strerror(number))

    store = FileStore(root, Failing(root.parent / "cache"), 10)
    with pytest.raises(kind, match=os.strerror(number)):
        await store.fetch(PATH)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
async def test_a_directory_without_permission_is_denied(root: Path):
    root.chmod(0o500)
    with pytest.raises(StoreDenied, match="Permission"):
        await a_store(root).publish(*an_entry())
    root.chmod(0o700)


async def test_a_store_that_hangs_is_unavailable_within_its_deadline(root: Path):
    end = threading.Event()
    off_loop = OffLoop("hanging", threads_max=1)
    hanging = asyncio.create_task(off_loop.run(end.wait, 60))
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable, match=r"did not answer in 0\.05 s"):
        await a_store(root, off_loop, timeout_s=0.05).fetch(PATH)
    end.set()
    await hanging


async def test_a_pipe_under_the_name_of_a_file_is_corrupt_and_not_waited_for(root: Path):
    await a_store(root).publish(*an_entry())
    (root / PATH / DATA).unlink()
    os.mkfifo(root / PATH / DATA)
    with pytest.raises(StoreCorrupt, match="regular"):
        await a_store(root).fetch(PATH)


async def test_a_link_to_a_file_elsewhere_is_corrupt(root: Path, tmp_path: Path):
    _, files = an_entry()
    await a_store(root).publish(*an_entry())
    (tmp_path / "elsewhere").write_bytes(files[DATA])
    (root / PATH / DATA).unlink()
    (root / PATH / DATA).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreCorrupt, match="regular"):
        await a_store(root).fetch(PATH)


async def test_a_manifest_of_absurd_size_is_not_read(root: Path):
    await a_store(root).publish(*an_entry())
    with (root / PATH / MANIFEST_NAME).open("wb") as manifest:
        manifest.truncate(1 << 40)
    with pytest.raises(StoreCorrupt, match="a manifest of 1099511627776 bytes"):
        await a_store(root).fetch(PATH)


async def test_what_a_crash_left_in_staging_is_swept_after_a_day(root: Path):
    old, young = root / STAGING / "old", root / STAGING / "young"
    for directory in (old, young):
        directory.mkdir(parents=True)
    yesterday = time.time() - STAGING_LIFETIME_S - 1
    os.utime(old, (yesterday, yesterday))
    await a_store(root).publish(*an_entry())
    assert young.exists()
    assert not old.exists()
    assert await a_store(root).list("") == [PATH]


async def test_a_cache_keeps_the_entries_used_last(root: Path, tmp_path: Path):
    store = FileStore(root, EntryCache(tmp_path / "small", entries_max=3), 10)
    for i in range(5):
        await store.publish(*an_entry(f"test/{i}"))
        manifest = await store.fetch(f"test/{i}") / MANIFEST_NAME
        os.utime(manifest, (i, i))
        if i:
            await store.fetch("test/0")
    kept = sorted(path.parent.name for path in (tmp_path / "small").rglob(MANIFEST_NAME))
    assert kept == ["0", "3", "4"]


async def test_a_copy_that_another_process_spoiled_is_replaced(root: Path, tmp_path: Path):
    _, files = an_entry()
    await a_store(root).publish(*an_entry())
    copy = await a_store(root).fetch(PATH)
    (copy / MANIFEST_NAME).write_bytes(b"{")
    assert (await a_store(root).fetch(PATH) / DATA).read_bytes() == files[DATA]


async def test_a_file_where_a_directory_should_be_is_not_an_entry(root: Path):
    (root / "test").write_text("")
    with pytest.raises(StoreNotFound):
        await a_store(root).fetch(PATH)
    with pytest.raises(StoreDenied):
        await a_store(root).publish(*an_entry())


async def test_clearing_remains_leaves_a_complete_entry_alone(root: Path):
    await a_store(root).publish(*an_entry())
    clear_remains(root / PATH, PATH)
    await a_store(root).fetch(PATH)
