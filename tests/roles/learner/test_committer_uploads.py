"""What the committer uploads: everything that the bucket alone must be able to tell."""

from __future__ import annotations

from pathlib import Path

from node.virtual_time import in_virtual_time
from protocol.reasons import DropReason
from protocol.subjects import Bucket
from roles.learner.buffer import Dropped
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
