"""The norm bound as peers read updates: one verdict, whoever reads, and whenever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS
from protocol.errors import StoreCorrupt, StoreNotFound
from protocol.messages import Head
from roles.learner.merger import Merger
from roles.learner.witness import Witness
from roles.policy.compose import Factors
from roles.policy.follower import POLL_S, Arrival, PolicyFollower
from roles.policy.policies import Policies, PolicyVersion
from tests.build import a_runspec
from tests.ground import Ground, running

WILD = 1000
"""Count of an update whose every entry is 1000: its step from nothing is 1000 times that of the first."""


async def a_crowd(directory: Path, **settings: Any) -> tuple[Ground, Factors]:
    """Three learners with an update each of steps 1, 1 and 1."""
    ground = Ground(directory, a_runspec(learner=settings))
    genesis = await ground.claim_genesis()
    for name in ("learner-1", "learner-2", "learner-3"):
        await ground.commit_update(genesis, 1, learner=name)
    return ground, genesis


async def commit_wild(ground: Ground, genesis: Factors, learner: str = "learner-4", **changes: Any) -> Head:
    """A learner's update that is out of proportion to those in its clock: a step of 1000 at weight 1."""
    peers = {"learner-1": 1, "learner-2": 1, "learner-3": 1}
    return await ground.commit_update(
        genesis, WILD, learner=learner, weight=1.0, **({"peers": peers} | changes)
    )


async def a_reader(ground: Ground, node: str = "sampler-1") -> Policies:
    policies = Policies(ground.ring(node), ground.store(), ground.offload)
    await policies.start()
    await policies.read_heads()
    return policies


@in_virtual_time
async def test_an_update_out_of_proportion_is_refused_and_one_in_proportion_is_not(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)
    await commit_wild(ground, genesis)
    await ground.commit_update(genesis, 5, learner="learner-5", weight=1.0, peers={"learner-1": 1})
    policies = await a_reader(ground)
    with pytest.raises(StoreCorrupt, match=r"norm 5657 at weight 1 is more than 10 times 5\.657, the median"):
        await policies.update("learner-4", WILD)
    assert (await policies.update("learner-5", 5)).manifest.count == 5


@in_virtual_time
async def test_the_verdict_does_not_depend_on_what_else_a_peer_has_seen(tmp_path: Path):
    """One has read all peers, one nobody; since then the peers have gone on with other steps."""
    ground, genesis = await a_crowd(tmp_path)
    early = await a_reader(ground, "sampler-1")
    for name in ("learner-1", "learner-2", "learner-3"):
        await early.update(name, 1)
    await commit_wild(ground, genesis)
    for name in ("learner-1", "learner-2", "learner-3"):
        await ground.commit_update(genesis, 900, learner=name, weight=2.0)
    late = await a_reader(ground, "sampler-2")
    await early.read_heads()
    reasons = []
    for policies in (early, late):
        with pytest.raises(StoreCorrupt) as refused:
            await policies.update("learner-4", WILD)
        reasons.append(str(refused.value))
    assert reasons[0] == reasons[1]


@in_virtual_time
async def test_only_the_peers_in_the_updates_own_clock_count(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)
    await commit_wild(ground, genesis, peers={})
    assert (await (await a_reader(ground)).update("learner-4", WILD)).manifest.count == WILD


@in_virtual_time
async def test_a_run_may_switch_the_bound_off(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path, step_norm_max=0.0)
    await commit_wild(ground, genesis, step_norm=0.0)
    assert (await (await a_reader(ground)).update("learner-4", WILD)).manifest.count == WILD


@pytest.mark.parametrize("follows", [True, False])
@in_virtual_time
async def test_a_liar_is_refused_by_whoever_holds_its_update_before_and_by_whoever_comes_late(
    tmp_path: Path, *, follows: bool
):
    ground, genesis = await a_crowd(tmp_path)
    reader = await a_reader(ground)
    if follows:
        await reader.update("learner-1", 1)
    await ground.commit_update(genesis, 2, step_norm=1.0, peers={"learner-2": 1})
    await reader.read_heads()
    with pytest.raises(StoreCorrupt, match=r"has norm 5\.657 at weight 1, not 1 as its manifest says"):
        await reader.update("learner-1", 2)


@in_virtual_time
async def test_whose_update_before_is_not_kept_any_more_is_taken_at_its_word(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)
    await ground.commit_update(genesis, 2, step_norm=1.0, peers={"learner-2": 1})
    await ground.store().delete("test/updates/learner-1/1-test")
    assert (await (await a_reader(ground)).update("learner-1", 2)).manifest.count == 2


@in_virtual_time
async def test_alone_in_its_clock_an_update_costs_its_readers_one_file(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)
    await ground.commit_update(genesis, 2)
    fetched: list[str] = []
    store = ground.store(lambda op, path: fetched.append(path) if op == "fetch" else None)
    policies = Policies(ground.ring("sampler-1"), store, ground.offload)
    await policies.start()
    await policies.read_heads()
    await policies.update("learner-1", 2)
    assert [path for path in fetched if "/updates/" in path] == ["test/updates/learner-1/2-test"]


@in_virtual_time
async def test_a_part_of_the_peers_steps_refuses_nothing_that_all_of_them_allow(tmp_path: Path):
    """One late reader's median would be another: a verdict must not depend on what the store still keeps."""
    ground, genesis = await a_crowd(tmp_path)
    far = await ground.commit_update(genesis, 200, learner="learner-4", weight=1.0)
    await commit_wild(ground, genesis, learner="learner-5", peers={"learner-1": 1, "learner-4": 200})
    assert (await (await a_reader(ground)).update("learner-5", WILD)).manifest.count == WILD
    await ground.commit_update(genesis, 201, learner="learner-4", weight=2.0)
    await ground.store().delete(far.path)
    assert (await (await a_reader(ground)).update("learner-5", WILD)).manifest.count == WILD


@in_virtual_time
async def test_a_peers_update_that_is_not_there_yet_is_waited_for(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)
    await commit_wild(ground, genesis, peers={"learner-1": 2})
    reader = await a_reader(ground)
    with pytest.raises(StoreNotFound, match="update 2 of learner-1"):
        await reader.update("learner-4", WILD)
    await ground.commit_update(genesis, 2)
    with pytest.raises(StoreCorrupt, match="the median of its peers"):
        await reader.update("learner-4", WILD)


@in_virtual_time
async def test_a_refused_update_is_reported_and_does_not_freeze_the_others(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)

    async def ignore(policy: PolicyVersion, arrival: Arrival) -> None:
        """No engine here."""

    policies = Policies(ground.ring("sampler-1"), ground.store(), ground.offload)
    follower = PolicyFollower(ground.ring("sampler-1"), policies, ignore)
    async with running(follower):
        await commit_wild(ground, genesis)
        await ground.clock.sleep(2 * POLL_S)
        await ground.commit_update(genesis, 2, learner="learner-2")
        await ground.clock.sleep(1.0)
        assert follower.current is not None
        assert follower.current.clock.text == "learner-1:1,learner-2:2,learner-3:1"
        (told,) = ground.told("update_rejected")
        assert (told["update"], told["kind"]) == (f"learner-4:{WILD}", "StoreCorrupt")
        assert "more than 10 times 5.657" in str(told["reason"])


@in_virtual_time
async def test_a_learner_passes_over_a_refused_update_and_merges_the_others(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)
    policies = await a_reader(ground, "learner-9")
    arrived = asyncio.Event()
    ring = ground.ring("learner-9")
    merger = Merger(ring, policies, Witness(ring, ground.store()), lambda: GENESIS, arrived)
    await commit_wild(ground, genesis)
    async with running(merger):
        await ground.clock.sleep(2 * POLL_S)
        await ground.commit_update(genesis, 2, learner="learner-2")
        await ground.clock.sleep(1.0)
        taken = [update.manifest.author for update in merger.take(GENESIS)]
    assert taken == ["learner-1", "learner-2", "learner-3"]
    (told,) = ground.told("update_rejected")
    assert told["update"] == f"learner-4:{WILD}"


@in_virtual_time
async def test_the_next_update_of_a_refused_author_brings_the_refused_step_with_it(tmp_path: Path):
    """A known limit: updates are cumulative, so a bound on steps cannot keep a step out for ever."""
    ground, genesis = await a_crowd(tmp_path)
    await commit_wild(ground, genesis)
    policies = await a_reader(ground)
    with pytest.raises(StoreCorrupt):
        await policies.update("learner-4", WILD)
    await ground.commit_update(genesis, WILD + 1, learner="learner-4", weight=2.0, peers={"learner-1": 1})
    await policies.read_heads()
    assert (await policies.update("learner-4", WILD + 1)).manifest.count == WILD + 1
