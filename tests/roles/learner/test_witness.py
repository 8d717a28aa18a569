"""A peer's head that a restored broker does not have is stored as its author committed it, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.virtual_time import in_virtual_time
from protocol.clock import VectorClock
from protocol.codec import encode
from protocol.identity import Identity
from protocol.manifest import EntryKind
from protocol.messages import Head
from protocol.ports import Write
from protocol.subjects import GENESIS_KEY, Bucket, done_key, head_key
from roles.learner.committer import nothing_committed
from roles.learner.done import done_write, outcome_of
from roles.learner.update_entry import HEAD_FILE
from roles.learner.witness import Witness
from roles.policy.chains import TRAINED, UNCERTAIN
from roles.policy.policies import Policies
from tests.ground import Ground

PATH = "test/updates/learner-2/1-abc"
KEY = head_key("learner-2")


class Scene:
    """A broker that was restored without learner-2's head, which learner-1 has seen."""

    def __init__(self, directory: Path) -> None:
        self.ground = Ground(directory)
        self.keys = self.ground.run.buckets[Bucket.POLICY]
        self.head = nothing_committed("test", "learner-2").model_copy(
            update={"count": 1, "path": PATH, "nonce": "seen"}
        )
        self.witness = Witness(self.ground.ring(), self.ground.store())

    async def begin(self) -> None:
        await self.ground.claim_genesis()
        await self.ground.publish(
            PATH,
            EntryKind.UPDATE,
            {HEAD_FILE: self.frame},
            author="learner-2",
            count=1,
            clock=VectorClock.of({"learner-2": 1}),
            groups=("learner-1.0", "learner-1.1"),
            dropped={"learner-1.2": "stale"},
        )

    @property
    def frame(self) -> bytes:
        return encode(self.head, Identity.deterministic("learner-2"))

    def mark(self, group: str, outcome: str) -> None:
        self.keys.write([done_write(group, outcome, "learner-2", 1)])

    def outcome(self, group: str) -> str:
        entry = self.keys.get(done_key(group))
        return outcome_of(entry.value) if entry is not None else ""

    @property
    def stands(self) -> bytes | None:
        entry = self.keys.get(KEY)
        return entry.value if entry is not None else None


@pytest.mark.parametrize("older", [False, True])
@in_virtual_time
async def test_what_was_uncertain_is_committed_again(tmp_path: Path, older: bool):
    scene = Scene(tmp_path)
    await scene.begin()
    scene.mark("learner-1.0", UNCERTAIN)
    if older:
        scene.keys.write([Write(KEY, b"an older head")])
    await scene.witness.testify([scene.head])
    assert scene.stands == scene.frame
    outcomes = [scene.outcome(f"learner-1.{number}") for number in range(3)]
    assert outcomes == [TRAINED, TRAINED, "stale"]


@in_virtual_time
async def test_what_others_have_consumed_since_stays_theirs(tmp_path: Path):
    scene = Scene(tmp_path)
    await scene.begin()
    scene.mark("learner-1.1", TRAINED)
    await scene.witness.testify([scene.head])
    assert (scene.stands, scene.outcome("learner-1.0")) == (None, "")


@in_virtual_time
async def test_a_broker_that_is_still_being_restored_is_left_alone(tmp_path: Path):
    scene = Scene(tmp_path)
    await scene.begin()
    scene.ground.run.buckets[Bucket.RUN].delete(GENESIS_KEY)
    await scene.witness.testify([scene.head])
    assert scene.stands is None


@in_virtual_time
async def test_an_upload_that_its_author_removed_is_not_testified(tmp_path: Path):
    scene = Scene(tmp_path)
    await scene.begin()
    await scene.ground.store().delete(PATH)
    await scene.witness.testify([scene.head])
    assert scene.stands is None


@in_virtual_time
async def test_a_peer_believes_the_brokers_newest_word_and_remembers_what_it_saw(tmp_path: Path):
    ground = Ground(tmp_path)
    genesis = await ground.claim_genesis()
    policies = Policies(ground.ring(), ground.store(), ground.offload)
    await policies.start()
    first = await ground.commit_update(genesis, 1, learner="learner-2")
    second = await ground.commit_update(genesis, 2, learner="learner-2")
    third = await ground.commit_update(genesis, 1, learner="learner-3")
    await policies.read_heads()
    assert policies.lost == []
    ground.run.buckets[Bucket.POLICY].delete(head_key("learner-3"))
    await ground.bus().put(Bucket.POLICY, KEY, encode(first, Identity.deterministic("learner-2")))
    assert (await policies.read_heads()).counts == (("learner-2", 1),)
    assert lost(policies) == {"learner-2": second.nonce, "learner-3": third.nonce}


def lost(policies: Policies) -> dict[str, str]:
    """Nonces of heads that were seen and are gone, by learner."""
    heads: list[Head] = policies.lost
    return {head.learner: head.nonce for head in heads}
