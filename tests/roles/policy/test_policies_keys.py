"""Whose heads and updates a peer believes: a learner's name belongs to the key of its first head."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS
from protocol.codec import encode
from protocol.errors import StoreCorrupt
from protocol.identity import Identity
from protocol.limits import COUNT_MAX, LEARNERS_MAX
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head
from protocol.subjects import Bucket, head_key
from roles.policy.compose import UPDATE_FILE, Factors
from roles.policy.follower import POLL_S, Arrival, PolicyFollower
from roles.policy.norm_bound import step_norm
from roles.policy.peft_export import factors_bytes
from roles.policy.policies import Policies, PolicyVersion
from tests.build import a_clock, an_identity
from tests.ground import Ground, an_update, running

MALLORY = an_identity("mallory")


def a_head(learner: str, count: int = 1, path: str = "") -> Head:
    return Head(
        run="test",
        learner=learner,
        count=count,
        clock=GENESIS,
        weight=float(count),
        path=path,
        policy_digest="",
        nonce="forged",
    )


async def put(ground: Ground, head: Head, signer: Identity = MALLORY) -> None:
    await ground.bus().put(Bucket.POLICY, head_key(head.learner), encode(head, signer))


async def begin(directory: Path, node: str = "sampler-1") -> tuple[Ground, Factors, Policies]:
    ground = Ground(directory)
    genesis = await ground.claim_genesis()
    policies = Policies(ground.ring(node), ground.store(), ground.offload)
    await policies.start()
    return ground, genesis, policies


async def publish_update(ground: Ground, genesis: Factors, path: str, signer: Identity) -> None:
    """learner-1's first update, by whoever signs it."""
    files = {UPDATE_FILE: factors_bytes(an_update(genesis, 1))}
    manifest = Manifest(
        path=path,
        kind=EntryKind.UPDATE,
        run="test",
        author="learner-1",
        count=1,
        weight=1.0,
        step_norm=step_norm(an_update(genesis, 1), None, 1.0),
        files=Manifest.describe(files),
    )
    await ground.store().publish(manifest.signed(signer), files)


@in_virtual_time
async def test_a_head_of_another_key_than_the_learners_first_is_ignored_with_one_warning(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    await ground.commit_update(genesis, 1)
    await policies.read_heads()
    with capture_logs() as logs:
        await put(ground, a_head("learner-1", 9))
        for _ in range(3):
            assert (await policies.read_heads()).text == "learner-1:1"
    assert [log["event"] for log in logs] == ["head_of_another_key"]
    await ground.commit_update(genesis, 2)
    assert (await policies.read_heads()).text == "learner-1:2"


@in_virtual_time
async def test_an_update_of_another_key_than_its_learners_head_is_refused(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    await publish_update(ground, genesis, "test/updates/learner-1/1-aaaa", MALLORY)
    await put(ground, a_head("learner-1", 1, "test/updates/learner-1/1-aaaa"), an_identity("learner-1"))
    await policies.read_heads()
    with pytest.raises(StoreCorrupt, match="another key than the heads of learner-1"):
        await policies.update("learner-1", 1)


@in_virtual_time
async def test_what_was_read_before_a_learners_key_was_known_is_looked_up_again(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    await publish_update(ground, genesis, "test/updates/learner-1/1-aaaa", MALLORY)
    assert (await policies.update("learner-1", 1)).manifest.signer == MALLORY.public_key
    await put(ground, a_head("learner-1", 2), an_identity("learner-1"))
    await policies.read_heads()
    with pytest.raises(StoreCorrupt, match="another key"):
        await policies.update("learner-1", 1)
    with pytest.raises(StoreCorrupt, match="another key"):
        await policies.version(a_clock(**{"learner-1": 1}))


@in_virtual_time
async def test_a_head_under_our_own_name_is_seen_whoever_signed_it(tmp_path: Path):
    """That is how a learner learns that another process is the one its peers believe."""
    ground, _, policies = await begin(tmp_path, "learner-1")
    policies.note_head(a_head("learner-1", 2), an_identity("learner-1").public_key)
    await put(ground, a_head("learner-1", 3))
    assert (await policies.read_heads()).text == "learner-1:3"


@in_virtual_time
async def test_heads_of_more_learners_than_a_clock_can_name_are_ignored_with_one_warning_each(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    await ground.commit_update(genesis, 1)
    await policies.read_heads()
    with capture_logs() as logs:
        for number in range(LEARNERS_MAX + 1):
            await put(ground, a_head(f"ghost-{number}"))
        for _ in range(2):
            clock = await policies.read_heads()
    assert (len(clock.counts), clock["learner-1"]) == (LEARNERS_MAX, 1)
    assert [log["event"] for log in logs] == ["head_of_one_learner_too_many"] * 2
    await ground.commit_update(genesis, 2)
    assert (await policies.read_heads())["learner-1"] == 2


@pytest.mark.parametrize(
    "path", ["", "test/updates/ghost/1-x", "test/updates/learner-1/1-test", f"test/{'x' * 390}"]
)
@in_virtual_time
async def test_a_forged_head_of_an_unknown_learner_does_not_stop_the_others(tmp_path: Path, path: str):
    ground, genesis, policies = await begin(tmp_path)

    async def ignore(policy: PolicyVersion, arrival: Arrival) -> None:
        """No engine here."""

    follower = PolicyFollower(policies._ring, policies, ignore)
    async with running(follower):
        await ground.commit_update(genesis, 1)
        await put(ground, a_head("ghost", COUNT_MAX, path))
        await ground.clock.sleep(POLL_S)
        await ground.commit_update(genesis, 2)
        await ground.commit_update(genesis, 1, learner="learner-2")
        await ground.clock.sleep(POLL_S)
        assert follower.current is not None
        assert follower.current.clock.text == "learner-1:2,learner-2:1"
        assert [told["update"] for told in ground.told("update_rejected")] == [f"ghost:{COUNT_MAX}"]


@in_virtual_time
async def test_more_learners_than_a_clock_can_name_do_not_stop_a_follower(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)

    async def ignore(policy: PolicyVersion, arrival: Arrival) -> None:
        """No engine here."""

    follower = PolicyFollower(policies._ring, policies, ignore)
    async with running(follower):
        await ground.commit_update(genesis, 1)
        await ground.clock.sleep(1.0)
        for number in range(LEARNERS_MAX + 1):
            await put(ground, a_head(f"ghost-{number}"))
        await ground.commit_update(genesis, 2)
        await ground.clock.sleep(POLL_S)
        assert follower.current is not None
        assert follower.current.clock.text == "learner-1:2"
