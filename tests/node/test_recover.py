"""Recover: what it takes from a bucket, and what it leaves alone there."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.memory_broker import MemoryBroker
from node.memory_bus import MemoryBus
from node.recover import Recovered, read_spec, recover_run
from node.virtual_time import in_virtual_time
from protocol.errors import OperatorError, StoreCorrupt
from protocol.manifest import MANIFEST_NAME, EntryKind
from protocol.subjects import GENESIS_KEY, Bucket, done_key
from roles.learner.commit import Resumed
from roles.policy.chains import PREVIOUS
from roles.policy.compose import factors_digest
from tests.build import an_identity
from tests.ground import Ground, running
from tests.roles.learner.test_committer import Bench

STRANGE = (
    "run-notes",
    "run-0123456789abcdef.bak",
    "genesis/old",
    "genesis/0123456789abcdeX",
    "updates/readme",
    "updates/learner-1/notes",
    "updates/learner-1/2-Copy",
    "updates/learner-1/old/2-aaaa",
)


async def a_run(directory: Path, updates: int = 2) -> Ground:
    """A bucket with settings, genesis and updates of learner-1, each of a group of its own."""
    ground = Ground(directory)
    genesis = await ground.claim_genesis()
    settings = {"run.json": ground.spec.model_dump_json().encode()}
    await ground.publish(f"test/run-{ground.spec.digest}", EntryKind.RUN, settings)
    bench = Bench(ground)
    await bench.committer.begin(Resumed(), factors_digest(genesis))
    async with running(bench.committer):
        for _ in range(updates):
            await bench.committer.submit(bench.step())
        await bench.committer.drained()
    return ground


async def recovered(ground: Ground) -> tuple[Recovered, MemoryBus]:
    """At a broker that has nothing."""
    bus = MemoryBus(MemoryBroker(ground.clock), "test", node="operator")
    return await recover_run(bus, ground.store(), "test", an_identity("operator")), bus


@in_virtual_time
async def test_a_run_comes_back_from_its_bucket_alone(tmp_path: Path):
    ground = await a_run(tmp_path)
    found, bus = await recovered(ground)
    assert (found.learners, found.groups_trained, found.groups_recognised) == ({"learner-1": 2}, 2, 2)
    claimed = await bus.get(Bucket.RUN, GENESIS_KEY)
    assert claimed is not None
    assert claimed.value.startswith(b"test/genesis/")
    assert await bus.get(Bucket.POLICY, done_key("learner-1.1")) is not None


@in_virtual_time
async def test_what_people_put_into_the_bucket_is_left_alone(tmp_path: Path):
    ground = await a_run(tmp_path)
    ground.bucket.entries |= {f"test/{name}": {MANIFEST_NAME: b"mine"} for name in STRANGE}
    found, _ = await recovered(ground)
    assert (found.learners, found.uncertain) == ({"learner-1": 2}, [])


@in_virtual_time
async def test_an_update_under_the_name_of_another_is_none(tmp_path: Path):
    """Else whoever may write anywhere in the bucket could take a learner's name with a first update."""
    ground = await a_run(tmp_path)
    fields = {"author": "mallory", "count": 1, "groups": ("learner-1.9",)}
    await ground.publish("test/updates/learner-1/1-forged", EntryKind.UPDATE, {}, **fields)
    await ground.publish("test/updates/mallory/2-aaaa", EntryKind.UPDATE, {}, **fields)
    found, _ = await recovered(ground)
    assert found.learners == {"learner-1": 2}


@in_virtual_time
async def test_an_update_that_cannot_be_read_is_not_passed_over(tmp_path: Path):
    ground = await a_run(tmp_path)
    ground.bucket.entries["test/updates/learner-1/1-broken"] = {MANIFEST_NAME: b"{"}
    with pytest.raises(StoreCorrupt, match="try again, or delete that entry to recover without it"):
        await recovered(ground)


@in_virtual_time
@pytest.mark.parametrize(
    ("files", "why"),
    [({}, "an update without its head.bin"), ({"head.bin": b"no frame"}, "a frame of 8 bytes")],
)
async def test_an_update_that_brings_back_no_head_is_one_line(
    tmp_path: Path, files: dict[str, bytes], why: str
):
    ground = await a_run(tmp_path)
    (second,) = [path for path in ground.bucket.entries if path.startswith("test/updates/learner-1/2-")]
    path, fields = "test/updates/learner-1/3-aaaa", {"author": "learner-1", "count": 3}
    extra = {PREVIOUS: second}
    await ground.publish(path, EntryKind.UPDATE, files, groups=("learner-1.9",), extra=extra, **fields)
    with pytest.raises(StoreCorrupt, match=f"{path} brings back no head.*{why}.*delete that entry") as told:
        await recovered(ground)
    assert "\n" not in str(told.value)
    del ground.bucket.entries[path]
    found, _ = await recovered(ground)
    assert found.learners == {"learner-1": 2}


@in_virtual_time
async def test_settings_are_told_from_what_lies_beside_them(tmp_path: Path):
    ground = await a_run(tmp_path, updates=0)
    ground.bucket.entries |= {f"test/{name}": {MANIFEST_NAME: b"mine"} for name in STRANGE}
    assert await read_spec(ground.store(), "test") == ground.spec
    with pytest.raises(OperatorError, match="the store holds no such run"):
        await read_spec(ground.store(), "another")
