"""The norm bound: one verdict for everybody, from what manifests record."""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS as GENESIS_CLOCK
from protocol.errors import StoreCorrupt, StoreNotFound
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head
from protocol.runspec import LearnerSpec
from roles.learner.fake_policy import FakePolicy
from roles.learner.merger import Merger
from roles.policy.chains import PREVIOUS
from roles.policy.compose import Factors
from roles.policy.follower import POLL_S, PolicyFollower
from roles.policy.norm_bound import Step, lie, out_of_proportion, step_norm
from roles.policy.policies import Policies, PolicyVersion
from tests.build import a_runspec
from tests.ground import Ground, an_update, running

GENESIS = FakePolicy().genesis(0)
ENTRIES = 32
"""Numbers of the fake policy's factors: a step of 1 in every one has norm sqrt(32)."""


def steps(*norms: float, version: float = 100.0) -> list[Step]:
    return [Step(norm, version) for norm in norms]


def judge(norm: float, *peers: float, **settings: Any) -> str | None:
    return out_of_proportion(Step(norm, 100.0), steps(*peers), LearnerSpec(**settings))


def test_the_norm_is_over_all_factors_and_at_weight_one():
    two, three = an_update(GENESIS, 2), an_update(GENESIS, 3)
    assert step_norm(three, two, 1.0) == pytest.approx(math.sqrt(ENTRIES))
    assert step_norm(three, two, 0.25) == pytest.approx(4 * math.sqrt(ENTRIES))
    assert step_norm(three, None, 1.0) == pytest.approx(3 * math.sqrt(ENTRIES))
    assert step_norm(three, three, 1.0) == 0.0


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_the_norm_of_what_is_not_finite_is_not_finite(number: float):
    assert step_norm({"a": np.array([[1.0, number]], np.float32)}, None, 1.0) == math.inf
    both = {"a": np.array([[np.inf]], np.float32)}
    assert step_norm(both, both, 1.0) == math.inf
    assert step_norm(GENESIS, None, 0.0) == math.inf


def test_a_step_is_refused_beyond_so_many_times_the_median_of_its_peers():
    assert judge(10.0, 1.0, 1.0, 1.0) is None
    assert judge(10.001, 1.0, 1.0, 1.0)
    assert judge(10.001, 0.5, 1.1, 5.0) is None
    assert judge(4.0, 1.0, step_norm_max=3.0)
    assert judge(20.0, 1.0, 3.0) is None, "of two the mean"


def test_the_reason_names_both_norms():
    assert judge(250.0, 2.0, 2.0) == (
        "a step of norm 250 at weight 1 is more than 10 times 2, the median of its peers"
    )


def test_without_peers_there_is_no_bound_but_to_be_finite():
    assert judge(1e30) is None
    assert judge(math.inf)
    assert judge(math.nan)


def test_a_peer_that_did_not_move_or_records_nothing_is_no_measure():
    assert judge(1e30, 0.0, 0.0) is None
    assert judge(11.0, 0.0, 1.0)


def test_zero_switches_the_bound_off():
    assert judge(1e30, 1.0, step_norm_max=0.0) is None
    assert judge(math.inf, 1.0, step_norm_max=0.0)


def test_the_order_of_the_peers_does_not_matter():
    peers = steps(0.3, 4.0, 1.0, 9.0)
    verdicts = {
        out_of_proportion(Step(26.0, 1.0), order, LearnerSpec()) for order in itertools.permutations(peers)
    }
    assert len(verdicts) == 1
    assert None not in verdicts


def test_a_peer_that_left_early_in_the_warm_up_does_not_hold_the_others_to_its_small_steps():
    settings = LearnerSpec(warmup_updates=50)
    left = steps(0.02, version=0.5)
    assert out_of_proportion(Step(1.0, 60.0), left, settings) is None
    assert out_of_proportion(Step(1.0, 60.0), left, LearnerSpec())
    assert out_of_proportion(Step(10.1, 60.0), left, settings)


def test_a_peer_further_in_the_warm_up_is_taken_as_it_is():
    settings = LearnerSpec(warmup_updates=50)
    assert out_of_proportion(Step(9.0, 1.0), steps(1.0), settings) is None
    assert out_of_proportion(Step(11.0, 1.0), steps(1.0), settings)


def a_manifest(count: int, norm: float, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "path": f"r/u/a/{count}",
        "kind": EntryKind.UPDATE,
        "run": "r",
        "author": "a",
        "count": count,
        "weight": float(count),
        "step_norm": norm,
        "files": (),
        "extra": {PREVIOUS: f"r/u/a/{count - 1}"} if count > 1 else {},
    }
    return Manifest(**(fields | changes))


def test_a_manifest_that_lies_about_its_step_is_found_out_with_the_update_before_at_hand():
    honest, update = math.sqrt(ENTRIES), an_update(GENESIS, 2)
    before = (a_manifest(1, honest), an_update(GENESIS, 1))
    assert lie(a_manifest(2, honest), update, before) is None
    assert lie(a_manifest(2, honest * 1.005), update, before) is None
    for told in (0.0, honest * 0.98, honest * 1.02):
        assert lie(a_manifest(2, told), update, before)
    assert lie(a_manifest(2, 0.0), update, None) is None, "nobody can tell"


def test_only_the_update_that_the_manifest_names_is_the_one_before():
    orphan = (a_manifest(1, 1.0, path="r/u/a/1-orphan"), an_update(GENESIS, 1))
    assert lie(a_manifest(2, 0.0), an_update(GENESIS, 2), orphan) is None


def test_a_first_update_has_nothing_before_it_and_cannot_lie():
    assert lie(a_manifest(1, math.sqrt(ENTRIES)), an_update(GENESIS, 1), None) is None
    assert lie(a_manifest(1, 1.0), an_update(GENESIS, 1), None)


def test_an_update_whose_weight_does_not_grow_is_a_lie():
    before = (a_manifest(1, 1.0, weight=2.0), an_update(GENESIS, 1))
    assert lie(a_manifest(2, math.sqrt(ENTRIES)), an_update(GENESIS, 2), before)


# --- as peers read updates -----------------------------------------------------------------------

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


@in_virtual_time
async def test_a_liar_is_refused_by_whoever_holds_its_update_before(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)
    reader = await a_reader(ground)
    await reader.update("learner-1", 1)
    await ground.commit_update(genesis, 2, step_norm=1.0)
    await reader.read_heads()
    with pytest.raises(StoreCorrupt, match=r"has norm 5\.657 at weight 1, not 1 as its manifest says"):
        await reader.update("learner-1", 2)


@in_virtual_time
async def test_a_peers_update_that_nobody_keeps_any_more_is_left_out(tmp_path: Path):
    ground, genesis = await a_crowd(tmp_path)
    await commit_wild(ground, genesis)
    for name in ("learner-1", "learner-2", "learner-3"):
        await ground.commit_update(genesis, 2, learner=name)
        await ground.store().delete(f"test/updates/{name}/1-test")
    assert (await (await a_reader(ground)).update("learner-4", WILD)).manifest.count == WILD


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

    async def ignore(policy: PolicyVersion) -> None:
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
    merger = Merger(ground.ring("learner-9"), policies, lambda: GENESIS_CLOCK, arrived)
    await commit_wild(ground, genesis)
    async with running(merger):
        await ground.clock.sleep(2 * POLL_S)
        await ground.commit_update(genesis, 2, learner="learner-2")
        await ground.clock.sleep(1.0)
        taken = [update.manifest.author for update in merger.take(GENESIS_CLOCK)]
    assert taken == ["learner-1", "learner-2", "learner-3"]
