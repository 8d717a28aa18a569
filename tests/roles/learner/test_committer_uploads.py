"""What the committer uploads: everything that the bucket alone must be able to tell."""

from __future__ import annotations

import asyncio
from pathlib import Path

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time
from protocol.codec import decode_as
from protocol.messages import Head
from protocol.reasons import DropReason
from protocol.subjects import Bucket
from roles.learner.buffer import Dropped
from roles.learner.commit import Resumed
from roles.learner.committer import FinishedStep
from roles.learner.lease import Lease
from roles.learner.update_entry import HEAD_FILE
from roles.policy.compose import UPDATE_FILE
from tests.ground import Ground, Handed, running
from tests.roles.learner.test_committer import HEAD, Bench


@in_virtual_time
async def test_what_was_consumed_between_two_uploads_is_listed_by_the_next(tmp_path: Path):
    """So that the bucket alone can tell what became of every group."""
    bench = Bench(Ground(tmp_path))
    drop = Dropped("learner-1.9", DropReason.UNSCORABLE, Lease(Handed()))
    async with running(bench.committer):
        await bench.committer.submit(bench.step())
        await bench.committer.submit(FinishedStep((), (drop,), None, None, 12, 0))
        await bench.committer.submit(bench.step("learner-1.5", published=False))
        for _ in range(2):
            await bench.committer.submit(bench.step())
        await bench.committer.drained()
    listed = [manifest.dropped for manifest in bench.manifests()]
    assert listed == [{}, {"learner-1.9": "unscorable", "learner-1.5": "trained"}, {}]


@in_virtual_time
async def test_an_upload_holds_the_head_exactly_as_it_is_committed(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    async with running(bench.committer):
        await bench.committer.submit(bench.step())
        await bench.committer.drained()
    entry = bench.ground.run.buckets[Bucket.POLICY].get(HEAD)
    assert entry is not None
    assert [files[HEAD_FILE] for files in bench.ground.bucket.entries.values()] == [entry.value]


@in_virtual_time
async def test_a_step_repeated_after_a_crash_with_other_drops_is_another_upload(tmp_path: Path):
    """The update's bytes are the same; the path must not be, for a path is written once."""
    ground = Ground(tmp_path)
    crashed, successor = Bench(ground), Bench(ground)
    lost = crashed.step("learner-1.0")
    _, upload = await crashed.committer._prepared(lost, crashed.committer._next_head(lost))
    await upload()
    drop = Dropped("learner-1.9", DropReason.STALE, Lease(Handed()))
    async with running(successor.committer):
        await successor.committer.submit(successor.step("learner-1.0", drops=(drop,)))
        await successor.committer.drained()
    assert len(ground.bucket.entries) == 2
    assert len({files[UPDATE_FILE] for files in ground.bucket.entries.values()}) == 1


@in_virtual_time
async def test_a_learner_that_starts_again_waits_for_a_store_that_denies_what_it_allowed(tmp_path: Path):
    """Killed with an upload behind it that was not committed, and the disk is read-only since."""
    ground, denied = Ground(tmp_path), True
    killed = Bench(ground)
    async with running(killed.committer):
        await killed.committer.submit(killed.step())
        await killed.committer.drained()
    lost = killed.step()
    _, upload = await killed.committer._prepared(lost, killed.committer._next_head(lost))
    await upload()
    entry = ground.run.buckets[Bucket.POLICY].get(HEAD)
    assert entry is not None
    resumed = Resumed(decode_as(entry.value, Head), entry.revision)
    successor = Bench(ground, lambda *_: StoreFault.DENIED if denied else None)
    beginning = asyncio.ensure_future(successor.committer.begin(resumed, ""))
    await ground.clock.sleep(300.0)
    assert (beginning.done(), len(ground.bucket.entries)) == (False, 2)
    denied = False
    await beginning
    assert list(ground.bucket.entries) == [killed.committed[0].path]
