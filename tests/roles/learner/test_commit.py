"""The commit: every row of its table, and a broker that was restored from the bucket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.virtual_time import in_virtual_time
from protocol.codec import decode_as, encode
from protocol.errors import FencedError
from protocol.messages import Head
from protocol.ports import Write
from protocol.subjects import GENESIS_KEY, Bucket, done_key, head_key
from roles.learner.commit import Conflict, HeadWriter, without
from roles.learner.committer import nothing_committed
from roles.learner.done import done_value, outcome_of
from roles.policy.chains import TRAINED, UNCERTAIN
from tests.build import an_identity
from tests.ground import Fault, FaultyBus, Ground

KEY = head_key("learner-1")


def a_head(nonce: str, **fields: object) -> Head:
    return nothing_committed("test", "learner-1").model_copy(update={"nonce": nonce, **fields})


class Desk:
    """A head writer, and the keys that it writes to."""

    def __init__(self, directory: Path) -> None:
        self.ground = Ground(directory)
        self.keys = self.ground.run.buckets[Bucket.POLICY]
        self.claim_genesis()
        self.bus: FaultyBus = self.ground.bus()
        self.writer = HeadWriter(self.ground.ring(bus=self.bus))

    def claim_genesis(self) -> None:
        self.ground.run.buckets[Bucket.RUN].write([Write(GENESIS_KEY, b"claimed")])

    @property
    def nonce(self) -> str:
        entry = self.keys.get(KEY)
        assert entry is not None
        return decode_as(entry.value, Head).nonce

    @property
    def done(self) -> dict[str, str]:
        entries = self.keys.below("done")
        return {key.removeprefix("done."): outcome_of(entry.value) for key, entry in entries.items()}

    def lose_everything(self) -> None:
        """The broker's disk is gone."""
        self.keys.lose()
        self.ground.run.buckets[Bucket.RUN].delete(GENESIS_KEY)

    def restore(self, head: Head | None, *groups: str, outcome: str = TRAINED) -> None:
        """What ``recover`` writes of a learner, at revisions that nobody has seen."""
        self.keys.write([Write("elsewhere", b"") for _ in range(1000)])
        for group in groups:
            self.keys.write([Write(done_key(group), done_value(outcome, "learner-1", 1))])
        if head is not None:
            self.keys.write([Write(KEY, encode(head, an_identity("learner-1")))])
        self.claim_genesis()


@in_virtual_time
async def test_groups_and_head_are_stored_together(tmp_path: Path):
    desk = Desk(tmp_path)
    stored = await desk.writer.commit(a_head("one"), {"learner-1.0": TRAINED, "learner-1.1": "stale"})
    assert (stored.nonce, desk.nonce) == ("one", "one")
    assert desk.done == {"learner-1.0": TRAINED, "learner-1.1": "stale"}


@in_virtual_time
async def test_a_refusal_with_the_old_head_in_place_is_a_conflict(tmp_path: Path):
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    desk.keys.write([Write(done_key("learner-1.1"), b"trained learner-2:1")])
    with pytest.raises(Conflict):
        await desk.writer.commit(a_head("two"), {"learner-1.0": TRAINED, "learner-1.1": TRAINED})
    assert (desk.nonce, list(desk.done)) == ("one", ["learner-1.1"])


@pytest.mark.parametrize("fault", [Fault.LANDED, Fault.LOST, Fault.ABSENT])
@in_virtual_time
async def test_whatever_happens_to_the_answer_it_is_stored_once(tmp_path: Path, fault: Fault):
    desk = Desk(tmp_path)
    desk.bus.commit_faults += [fault, fault]
    await desk.writer.commit(a_head("one"), {"learner-1.0": TRAINED})
    await desk.writer.commit(a_head("two"), {"learner-1.1": TRAINED})
    assert (desk.nonce, list(desk.done)) == ("two", ["learner-1.0", "learner-1.1"])


@in_virtual_time
async def test_somebody_elses_head_fences(tmp_path: Path):
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    desk.keys.write([Write(KEY, encode(a_head("theirs"), an_identity("learner-1")))])
    with pytest.raises(FencedError, match="another process trains as learner 'learner-1'"):
        await desk.writer.commit(a_head("two"), {})


@in_virtual_time
async def test_a_first_head_waits_until_the_run_is_there(tmp_path: Path):
    """It expects nothing: on a broker that is only being restored it would consume groups again."""
    desk = Desk(tmp_path)
    desk.ground.run.buckets[Bucket.RUN].delete(GENESIS_KEY)
    commit = asyncio.ensure_future(desk.writer.commit(a_head("one"), {"learner-1.0": TRAINED}))
    await desk.ground.clock.sleep(60.0)
    assert (commit.done(), desk.done) == (False, {})
    desk.claim_genesis()
    await commit
    assert desk.nonce == "one"


@in_virtual_time
async def test_a_head_that_is_gone_is_waited_for(tmp_path: Path):
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    desk.lose_everything()
    commit = asyncio.ensure_future(desk.writer.commit(a_head("two"), {"learner-1.1": TRAINED}))
    await desk.ground.clock.sleep(60.0)
    assert (commit.done(), desk.done) == (False, {})
    desk.restore(a_head("one"))
    await commit
    assert desk.nonce == "two"


@in_virtual_time
async def test_what_a_restored_broker_does_not_know_is_said_again(tmp_path: Path):
    """Drops that were committed since the newest upload are in no manifest."""
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {"learner-1.0": TRAINED})
    await desk.writer.commit(a_head("two", groups_dropped={"stale": 1}), {"learner-1.1": "stale"})
    await desk.writer.commit(a_head("three", groups_dropped={"stale": 2}), {"learner-1.2": "stale"})
    desk.lose_everything()
    desk.restore(a_head("one"), "learner-1.0")
    head = await desk.writer.commit(a_head("four", groups_dropped={"stale": 2}), {"learner-1.3": TRAINED})
    assert desk.done == {
        "learner-1.0": TRAINED,
        "learner-1.1": "stale",
        "learner-1.2": "stale",
        "learner-1.3": TRAINED,
    }
    assert (desk.nonce, head.groups_dropped) == ("four", {"stale": 2})
    assert len(desk.ground.told("head_restored")) == 1


@pytest.mark.parametrize("fault", [Fault.LANDED, Fault.LOST, Fault.ABSENT])
@in_virtual_time
async def test_saying_it_again_may_fail_and_loses_nothing(tmp_path: Path, fault: Fault):
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    await desk.writer.commit(
        a_head("two", groups_dropped={"stale": 2}), {"learner-1.1": "stale", "x.2": "stale"}
    )
    desk.lose_everything()
    desk.restore(a_head("one"))
    desk.keys.write([Write(done_key("x.2"), b"trained x:7")])
    desk.bus.commit_faults += [None, fault, fault]
    head = await desk.writer.commit(a_head("three", groups_dropped={"stale": 2}), {"learner-1.3": TRAINED})
    assert desk.done == {"learner-1.1": "stale", "learner-1.3": TRAINED, "x.2": TRAINED}
    assert (desk.nonce, head.groups_dropped) == ("three", {"stale": 1})


@in_virtual_time
async def test_a_broker_restored_without_this_head_is_told_everything(tmp_path: Path):
    """The bucket has no update of a learner that has only dropped groups so far."""
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    await desk.writer.commit(a_head("two", groups_dropped={"stale": 1}), {"learner-1.1": "stale"})
    desk.lose_everything()
    desk.restore(None)
    await desk.writer.commit(a_head("three", groups_dropped={"stale": 1}), {"learner-1.3": TRAINED})
    assert (desk.nonce, desk.done) == ("three", {"learner-1.1": "stale", "learner-1.3": TRAINED})


@in_virtual_time
async def test_only_who_knows_that_it_was_committed_takes_a_group_that_is_uncertain(tmp_path: Path):
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    await desk.writer.commit(a_head("two", groups_trained=1), {"learner-1.1": TRAINED})
    desk.lose_everything()
    desk.restore(a_head("one"), "learner-1.1", "learner-1.2", outcome=UNCERTAIN)
    with pytest.raises(Conflict):  # it does not know whether this was committed before
        await desk.writer.commit(a_head("three", groups_trained=2), {"learner-1.2": TRAINED})
    assert desk.done == {"learner-1.1": TRAINED, "learner-1.2": UNCERTAIN}


@in_virtual_time
async def test_a_refused_commit_that_recover_took_for_committed_is_adopted(tmp_path: Path):
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    refused = a_head("two", count=1)
    assert not await desk.writer.adopt(refused, {"learner-1.1": TRAINED})
    desk.lose_everything()
    desk.restore(refused, "learner-1.1")
    assert await desk.writer.adopt(refused, {"learner-1.1": TRAINED})
    await desk.writer.commit(a_head("three", count=1), {"learner-1.2": TRAINED})
    assert (desk.nonce, list(desk.done)) == ("three", ["learner-1.1", "learner-1.2"])


@in_virtual_time
async def test_what_a_head_names_is_uploaded_again_after_a_restoration(tmp_path: Path):
    """A process of the same name, whom the broker forgot, may have removed it."""
    desk = Desk(tmp_path)
    uploads = []

    async def upload() -> None:
        uploads.append(desk.nonce)

    await desk.writer.commit(a_head("one"), {}, upload)
    assert uploads == []
    desk.lose_everything()
    desk.restore(a_head("one"))
    await desk.writer.commit(a_head("two"), {}, upload)
    assert uploads == ["one"]


@in_virtual_time
async def test_a_head_by_another_process_is_noticed_without_a_commit(tmp_path: Path):
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    await desk.writer.commit(a_head("two"), {})
    await desk.writer.check_alone(a_head("one"))
    theirs = a_head("theirs")
    await desk.writer.check_alone(theirs)  # it came late: ours stands
    desk.keys.write([Write(KEY, encode(theirs, an_identity("learner-1")))])
    with pytest.raises(FencedError):
        await desk.writer.check_alone(theirs)


@in_virtual_time
async def test_a_drop_that_a_peer_trained_after_the_restoration_is_no_longer_counted(tmp_path: Path):
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    await desk.writer.commit(a_head("two", groups_dropped={"stale": 1}), {"learner-1.1": "stale"})
    desk.lose_everything()
    desk.restore(a_head("one"))
    desk.keys.write([Write(done_key("learner-1.1"), b"trained learner-2:7")])
    head = await desk.writer.commit(a_head("three", groups_dropped={"stale": 1}), {"learner-1.3": TRAINED})
    assert desk.done == {"learner-1.1": TRAINED, "learner-1.3": TRAINED}
    assert head.groups_dropped == {"stale": 0}


@in_virtual_time
async def test_an_upload_that_recover_took_for_committed_is_committed(tmp_path: Path):
    """The broker's disk was lost between upload and commit."""
    desk = Desk(tmp_path)
    await desk.writer.commit(a_head("one"), {})
    desk.lose_everything()
    desk.restore(a_head("two", count=1), "learner-1.1")
    head = await desk.writer.commit(a_head("two", count=1), {"learner-1.1": TRAINED})
    assert (head.nonce, desk.writer.revision) == ("two", desk.keys.get(KEY).revision)  # type: ignore[union-attr]


def test_taking_groups_out_of_a_heads_counts():
    head = a_head("one", groups_trained=3, groups_dropped={"stale": 2, "ahead": 1})
    less = without(head, {"a": TRAINED, "b": "stale"})
    assert (less.groups_trained, less.groups_dropped) == (2, {"stale": 1, "ahead": 1})
