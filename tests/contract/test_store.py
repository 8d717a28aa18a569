"""The contract of every adapter store: what publishers and readers may rely on, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import StoreConflict, StoreCorrupt, StoreNotFound
from protocol.manifest import MANIFEST_NAME
from tests.build import an_entry
from tests.contract.stores import World, publish_at_once

PATH = "test/updates/learner-1/1-abc"
DATA = "update.safetensors"


# --- what is published can be fetched ------------------------------------------------------------


async def test_an_entry_arrives_whole_at_another_node(world: World):
    manifest, files = an_entry()
    await world.node().publish(manifest, files)
    reader = world.node()
    directory = await reader.fetch(PATH)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == {
        **files,
        MANIFEST_NAME: manifest.to_json(),
    }
    assert await reader.manifest(PATH) == manifest


async def test_an_entry_may_hold_no_files(world: World):
    await world.node().publish(*an_entry(files={}))
    assert [file.name for file in (await world.node().fetch(PATH)).iterdir()] == [MANIFEST_NAME]


async def test_what_was_never_published_is_not_found(world: World):
    for call in (world.node().fetch, world.node().manifest):
        with pytest.raises(StoreNotFound):
            await call(PATH)
    assert await world.node().list("") == []


@pytest.mark.parametrize(
    "path", ["", "/etc", "../x", "a/../../b", "a//b", "a/.hidden", "a/", "a\n", "A" * 500]
)
async def test_a_path_cannot_leave_the_store(world: World, path: str):
    store = world.node()
    for call in (store.fetch, store.manifest, store.delete):
        with pytest.raises(StoreNotFound):
            await call(path)


async def test_a_copy_is_reused_and_survives_the_loss_of_the_entry(world: World):
    await world.node().publish(*an_entry())
    reader = world.node()
    directory = await reader.fetch(PATH)
    inode = (directory / DATA).stat().st_ino
    world.remove(PATH, DATA)
    assert (await reader.fetch(PATH) / DATA).stat().st_ino == inode


async def test_a_spoiled_copy_is_fetched_anew_after_a_restart(world: World):
    manifest, files = an_entry()
    await world.node().publish(manifest, files)
    directory = await world.node("reader").fetch(PATH)
    (directory / DATA).write_bytes(b"spoiled")
    assert (await world.node("reader").fetch(PATH) / DATA).read_bytes() == files[DATA]


# --- a path is written once ----------------------------------------------------------------------


async def test_publishing_the_same_bytes_again_succeeds(world: World):
    await world.node().publish(*an_entry())
    await world.node().publish(*an_entry())


async def test_publishing_other_bytes_is_refused_and_changes_nothing(world: World):
    manifest, files = an_entry()
    await world.node().publish(manifest, files)
    with pytest.raises(StoreConflict):
        await world.node().publish(*an_entry(files={DATA: b"other"}))
    assert (await world.node().fetch(PATH) / DATA).read_bytes() == files[DATA]


async def test_publishing_the_same_files_under_another_manifest_is_refused(world: World):
    await world.node().publish(*an_entry())
    with pytest.raises(StoreConflict):
        await world.node().publish(*an_entry(groups=("learner-1.0",)))


async def test_of_two_concurrent_publishers_one_wins_whole(world: World):
    for attempt in range(5):
        path = f"test/updates/learner-1/{attempt}-abc"
        entries = [an_entry(path, files={DATA: letter * 50_000}) for letter in (b"a", b"b")]
        won = await publish_at_once(world, entries)
        assert (await world.node().fetch(path) / DATA).read_bytes() == entries[won][1][DATA]


async def test_concurrent_publishers_of_the_same_bytes_all_succeed(world: World):
    await asyncio.gather(*(world.node().publish(*an_entry()) for _ in range(8)))
    assert await world.node().list("") == [PATH]


async def test_entries_do_not_nest(world: World):
    await world.node().publish(*an_entry("test/a/b"))
    for path in ("test/a", "test/a/b/c"):
        with pytest.raises(StoreConflict):
            await world.node().publish(*an_entry(path))
    assert await world.node().list("") == ["test/a/b"]


async def test_a_manifest_that_does_not_describe_its_files_is_not_published(world: World):
    manifest, files = an_entry()
    for wrong in ({**files, DATA: b"?"}, {DATA: files[DATA]}, {**files, "more": b""}):
        with pytest.raises(StoreCorrupt):
            await world.node().publish(manifest, wrong)
    with pytest.raises(StoreCorrupt):
        await world.node().publish(manifest.model_copy(update={"count": 9}), files)
    assert await world.node().list("") == []


# --- listing and deleting ------------------------------------------------------------------------


async def test_a_listing_is_by_directory_and_sorted(world: World):
    paths = ["test/a/1/x", "test/a/10/y", "test/a/10/z", "test/ab", "other/a"]
    for path in reversed(paths):
        await world.node().publish(*an_entry(path))
    store = world.node()
    assert await store.list("test/a/1") == ["test/a/1/x"]
    assert await store.list("test/a/10") == ["test/a/10/y", "test/a/10/z"]
    assert await store.list("test") == ["test/a/1/x", "test/a/10/y", "test/a/10/z", "test/ab"]
    assert await store.list("") == sorted(paths)
    assert await store.list("test/ab") == []
    assert await store.list("test/none") == []


async def test_a_deleted_entry_is_gone_for_everybody_and_its_path_is_free(world: World):
    store = world.node()
    await store.publish(*an_entry())
    await store.fetch(PATH)
    await store.delete(PATH)
    for reader in (store, world.node()):
        with pytest.raises(StoreNotFound):
            await reader.fetch(PATH)
    assert await store.list("") == []
    await store.publish(*an_entry(files={DATA: b"new"}))
    assert (await store.fetch(PATH) / DATA).read_bytes() == b"new"


async def test_deleting_what_is_absent_is_no_error(world: World):
    await world.node().delete(PATH)


async def test_deleting_an_entry_leaves_its_siblings(world: World):
    await world.node().publish(*an_entry("test/a/1"))
    await world.node().publish(*an_entry("test/a/10"))
    await world.node().delete("test/a/1")
    assert await world.node().list("test/a") == ["test/a/10"]


# --- all at once ---------------------------------------------------------------------------------


async def test_a_reader_that_races_a_publisher_sees_nothing_or_all(world: World):
    files = {f"part-{i}": bytes([i]) * 10_000 for i in range(8)}
    for attempt in range(5):
        path = f"test/updates/learner-1/{attempt}-abc"
        writing = asyncio.create_task(world.node().publish(*an_entry(path, files=files)))
        while True:
            try:
                directory = await world.node().fetch(path)
                break
            except StoreNotFound:
                await asyncio.sleep(0)
        assert {name: (directory / name).read_bytes() for name in files} == files
        await writing


async def test_fetching_one_entry_many_times_at_once_gives_one_copy(world: World):
    await world.node().publish(*an_entry())
    reader = world.node()
    directories = await asyncio.gather(*(reader.fetch(PATH) for _ in range(8)))
    assert len(set(directories)) == 1
