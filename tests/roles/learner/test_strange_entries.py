"""What people put among a learner's entries stops nobody, counts as nothing, and is never deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.memory_store import MemoryBucket
from node.virtual_time import in_virtual_time
from protocol.manifest import MANIFEST_NAME, EntryKind
from protocol.messages import Head
from roles.learner.checkpoint import claim_genesis, load_state, save_state
from roles.learner.commit import Resumed
from roles.learner.committer import nothing_committed
from roles.learner.fake_policy import FakePolicy
from roles.ring import cancelled
from tests.ground import Ground, running
from tests.roles.learner.test_committer import Bench
from tests.roles.learner.test_janitor import Desk

STRANGE = (
    "notes",
    "7-Backup",
    "0-aaaa",
    "07-aaaa",
    "-7-aaaa",
    "old/9-aaaa",
    "9-aaaa.bak",
    "²-aaaa",
    "²",
    "9999/1",
)


def put_beside(bucket: MemoryBucket, directory: str) -> set[str]:
    """Entries that no program of ours wrote: their manifests are none."""
    paths = {f"{directory}/{name}" for name in STRANGE}
    bucket.entries |= {path: {MANIFEST_NAME: b"mine"} for path in paths}
    return paths


@in_virtual_time
async def test_a_learner_begins_beside_them_with_one_warning_and_removes_only_its_uploads(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    strange = put_beside(bench.ground.bucket, "test/updates/learner-1")
    orphan = "test/updates/learner-1/1-aaaa"
    await bench.ground.publish(orphan, EntryKind.UPDATE, {}, count=1)
    with capture_logs() as logs:
        await bench.committer.begin(Resumed(), "digest")
    assert set(bench.ground.bucket.entries) == strange
    warnings = [log for log in logs if log["log_level"] == "warning"]
    assert [(log["event"], log["count"]) for log in warnings] == [("entries_not_ours", len(STRANGE))]


@in_virtual_time
async def test_they_do_not_make_a_learner_wait_for_recover(tmp_path: Path):
    ground = Ground(tmp_path)
    put_beside(ground.bucket, "test/updates/learner-1")
    ground.bucket.entries["test/updates/readme"] = {MANIFEST_NAME: b"mine"}
    await claim_genesis(ground.ring(), ground.store(), FakePolicy(), ground.offload)
    assert len(ground.told("genesis_claimed")) == 1


@in_virtual_time
async def test_an_update_makes_a_learner_wait_for_recover(tmp_path: Path):
    ground = Ground(tmp_path)
    await ground.publish("test/updates/learner-1/1-aaaa", EntryKind.UPDATE, {}, count=1)
    claiming = asyncio.ensure_future(
        claim_genesis(ground.ring(), ground.store(), FakePolicy(), ground.offload)
    )
    await ground.clock.sleep(100.0)
    assert not claiming.done()
    await cancelled(claiming)


@in_virtual_time
async def test_they_are_no_states(tmp_path: Path):
    ground = Ground(tmp_path)
    put_beside(ground.bucket, "test/state/learner-1")
    head: Head = nothing_committed("test", "learner-1").model_copy(update={"count": 9})
    ring, store = ground.ring(), ground.store()
    assert await load_state(ring, store, ground.offload, head) is None
    assert await save_state(ring, store, ground.offload, head, dict)
    assert await load_state(ring, store, ground.offload, head) == {}


@pytest.mark.parametrize("kind", ["updates", "state"])
@in_virtual_time
async def test_the_janitor_neither_counts_nor_deletes_them(tmp_path: Path, kind: str):
    desk = Desk(tmp_path)
    janitor = await desk.begin()
    strange = put_beside(desk.ground.bucket, f"test/{kind}/learner-1")
    async with running(janitor):
        await desk.ground.clock.sleep(1000.0)
        assert strange <= desk.ground.bucket.entries.keys()
        paths = sorted(desk.ground.bucket.entries.keys() - strange)
    assert [path for path in paths if "/learner-1/" in path] == [
        "test/updates/learner-1/5-test",
        "test/updates/learner-1/6-test",
    ]


@in_virtual_time
async def test_the_janitor_leaves_what_has_the_name_of_an_update_and_is_none(tmp_path: Path):
    desk = Desk(tmp_path)
    janitor = await desk.begin()
    broken, foreign = "test/updates/learner-1/1-broken", "test/updates/learner-1/2-foreign"
    desk.ground.bucket.entries[broken] = {MANIFEST_NAME: b"mine"}
    await desk.ground.publish(foreign, EntryKind.EXPORT, {}, count=2)
    async with running(janitor):
        await desk.ground.clock.sleep(1000.0)
    left = [path for path in desk.ground.bucket.entries if "/updates/learner-1/" in path]
    assert sorted(left) == [
        broken,
        foreign,
        "test/updates/learner-1/5-test",
        "test/updates/learner-1/6-test",
    ]
