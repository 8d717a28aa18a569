"""The contract of every adapter store when writers crash, disks fail and strangers lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocol.errors import StoreCorrupt, StoreError, StoreNotFound
from protocol.manifest import MANIFEST_NAME
from tests.build import an_entry, an_identity
from tests.contract.stores import World, publish_at_once

PATH = "test/updates/learner-1/1-abc"
DATA = "update.safetensors"


def copies(tmp_path: Path) -> list[str]:
    """Everything in any node's cache that has, or could be taken for, a final name."""
    found = [path for cache in tmp_path.glob("cache-*") for path in cache.rglob("*") if path.is_file()]
    return sorted(path.name for path in found)


# --- half-written entries do not exist -----------------------------------------------------------


async def test_data_without_a_manifest_does_not_exist(world: World, tmp_path: Path):
    world.write(PATH, DATA, b"factors" * 100)
    reader = world.node()
    with pytest.raises(StoreNotFound):
        await reader.fetch(PATH)
    assert await reader.list("") == []
    assert copies(tmp_path) == []


async def test_a_reader_stays_on_the_old_version_until_the_new_one_is_whole(world: World):
    old, new = "test/updates/learner-1/1-aaa", "test/updates/learner-1/2-bbb"
    await world.node().publish(*an_entry(old))
    manifest, files = an_entry(new)
    reader = world.node()
    before = await reader.fetch(old)
    world.write(new, "adapter_config.json", b"{}")
    with pytest.raises(StoreNotFound):
        await reader.fetch(new)
    for name, data in files.items():
        world.write(new, name, data)
    world.write(new, DATA, files[DATA][:-10])
    world.write(new, MANIFEST_NAME, manifest.to_json())
    with pytest.raises(StoreCorrupt, match="690 bytes, not 700"):
        await reader.fetch(new)
    assert (before / DATA).exists()
    world.write(new, DATA, files[DATA])
    assert (await reader.fetch(new) / DATA).read_bytes() == files[DATA]


async def test_a_publisher_replaces_what_a_crashed_one_left(world: World):
    manifest, files = an_entry()
    world.write(PATH, DATA, b"cut")
    world.write(PATH, "left-over", b"x")
    await world.node().publish(manifest, files)
    directory = await world.node().fetch(PATH)
    assert sorted(file.name for file in directory.iterdir()) == sorted([*files, MANIFEST_NAME])


async def test_many_publishers_over_the_remains_of_a_crash_leave_one_whole_entry(world: World):
    for attempt in range(5):
        path = f"test/updates/learner-1/{attempt}-abc"
        world.write(path, DATA, b"cut")
        entries = [an_entry(path, files={DATA: bytes([i]) * 20_000}) for i in range(4)]
        won = await publish_at_once(world, entries)
        assert (await world.node().fetch(path) / DATA).read_bytes() == entries[won][1][DATA]


# --- lies and damage -----------------------------------------------------------------------------


def torn(content: bytes) -> bytes:
    return content[: len(content) // 2]


def unsigned(content: bytes) -> bytes:
    return json.dumps(json.loads(content) | {"signature": ""}).encode()


def changed(content: bytes) -> bytes:
    return json.dumps(json.loads(content) | {"count": 7}).encode()


def signed_by_another_key(content: bytes) -> bytes:
    other = an_identity("mallory").public_key
    return json.dumps(json.loads(content) | {"signer": other}).encode()


def of_another_path(content: bytes) -> bytes:
    return an_entry("test/updates/learner-2/1-abc")[0].to_json()


def outside(content: bytes) -> bytes:
    body = json.loads(content)
    body["files"][0]["name"] = "../../../run.json"
    return json.dumps(body).encode()


BAD_MANIFESTS = [
    torn,
    unsigned,
    changed,
    signed_by_another_key,
    of_another_path,
    outside,
    lambda _: b"",
    lambda _: b"[]",
]


@pytest.mark.parametrize("spoil", BAD_MANIFESTS)
async def test_a_bad_manifest_is_corrupt_and_leaves_no_copy(world: World, tmp_path: Path, spoil):
    manifest, files = an_entry()
    await world.node().publish(manifest, files)
    world.write(PATH, MANIFEST_NAME, spoil(manifest.to_json()))
    reader = world.node()
    for call in (reader.fetch, reader.manifest):
        with pytest.raises(StoreCorrupt):
            await call(PATH)
    assert copies(tmp_path) == []
    with pytest.raises(StoreError):
        await world.node().publish(manifest, files)


@pytest.mark.parametrize("data", [b"", b"factors" * 99, b"factors" * 101, b"Factors" + b"factors" * 99])
async def test_a_file_of_another_size_or_content_is_corrupt(world: World, tmp_path: Path, data: bytes):
    await world.node().publish(*an_entry())
    world.write(PATH, DATA, data)
    with pytest.raises(StoreCorrupt, match=DATA):
        await world.node().fetch(PATH)
    assert copies(tmp_path) == []


async def test_a_missing_file_is_corrupt(world: World):
    await world.node().publish(*an_entry())
    world.remove(PATH, DATA)
    with pytest.raises(StoreCorrupt, match="missing"):
        await world.node().fetch(PATH)


async def test_a_file_that_no_manifest_lists_is_not_copied(world: World):
    manifest, files = an_entry()
    await world.node().publish(manifest, files)
    world.write(PATH, "evil.py", b"import os")
    directory = await world.node().fetch(PATH)
    assert sorted(file.name for file in directory.iterdir()) == sorted([*files, MANIFEST_NAME])


async def test_a_failed_fetch_leaves_the_good_copy_of_another_entry(world: World):
    await world.node().publish(*an_entry("test/a"))
    await world.node().publish(*an_entry("test/b"))
    world.write("test/b", DATA, b"cut")
    reader = world.node()
    good = await reader.fetch("test/a")
    with pytest.raises(StoreCorrupt):
        await reader.fetch("test/b")
    assert (good / DATA).exists()
    assert not (good.parent / "b").exists()
