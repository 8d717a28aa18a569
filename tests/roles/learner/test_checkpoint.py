"""Where a learner begins: one genesis, and the newest state that is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time
from protocol.errors import FencedError
from protocol.identity import Identity
from protocol.messages import Head
from protocol.ports import Write
from protocol.subjects import GENESIS_KEY, Bucket, done_key
from roles.learner.checkpoint import claim_genesis, export, find_head, load_state, save_state
from roles.learner.done import done_value
from roles.learner.fake_policy import FakePolicy
from roles.learner.policy import State
from roles.policy.policies import Policies
from roles.ring import Ring
from tests.build import a_clock, an_identity
from tests.ground import Ground


def a_head(count: int, learner: str = "learner-1") -> Head:
    clock = a_clock(**{learner: count})
    return Head(
        run="test",
        learner=learner,
        count=count,
        clock=clock,
        weight=count,
        path="",
        policy_digest="d",
        nonce="n",
    )


def a_state(steps: int) -> Callable[[], State]:
    return lambda: {"steps": np.array([steps], np.int64), "momentum": np.full((2, 3), steps, np.float32)}


async def saved(ground: Ground, *counts: int) -> None:
    for count in counts:
        assert await save_state(ground.ring(), ground.store(), ground.offload, a_head(count), a_state(count))


async def loaded(
    ground: Ground, count: int, *, faults: list[StoreFault] | None = None
) -> tuple[int | None, list[str]]:
    """Steps of the state found for a head, and the warnings on the way."""
    troubles = list(faults or [])
    store = ground.store(lambda op, _path: troubles.pop(0) if op == "fetch" and troubles else None)
    with capture_logs() as logs:
        state = await load_state(ground.ring(), store, ground.offload, a_head(count))
    warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    return None if state is None else int(state["steps"][0]), warnings


@in_virtual_time
async def test_two_learners_that_begin_at_once_have_one_genesis(tmp_path: Path):
    ground = Ground(tmp_path)
    rings = [ground.ring("learner-1"), ground.ring("learner-2")]
    await asyncio.gather(
        *(claim_genesis(ring, ground.store(), FakePolicy(), ground.offload) for ring in rings)
    )
    followers = [Policies(ring, ground.store(), ground.offload) for ring in rings]
    await asyncio.gather(*(policies.start() for policies in followers))
    assert followers[0].genesis_digest == followers[1].genesis_digest
    assert len(ground.told("genesis_claimed")) == 1


@in_virtual_time
async def test_a_learner_with_another_seed_uses_the_genesis_that_was_claimed_first(tmp_path: Path):
    class OtherPolicy(FakePolicy):
        def genesis(self, seed: int) -> dict[str, np.ndarray]:
            return super().genesis(seed + 1)

    ground = Ground(tmp_path)
    first = await ground.claim_genesis()
    ring = ground.ring("learner-2")
    await claim_genesis(ring, ground.store(), OtherPolicy(), ground.offload)
    policies = Policies(ring, ground.store(), ground.offload)
    await policies.start()
    for name in first:
        np.testing.assert_array_equal(policies.genesis[name], first[name])


@in_virtual_time
async def test_a_claim_that_is_lost_at_the_last_moment_is_respected(tmp_path: Path):
    """Both looked before either had claimed; the store has both, the broker one."""
    ground = Ground(tmp_path)
    bus = ground.bus("learner-2")
    task = asyncio.ensure_future(
        claim_genesis(ground.ring("learner-2", bus), ground.store(), FakePolicy(), ground.offload)
    )
    while not ground.bucket.entries:
        await ground.clock.sleep(0)
    await ground.bus().put(Bucket.RUN, GENESIS_KEY, b"elsewhere digest")
    await task
    entry = await bus.get(Bucket.RUN, GENESIS_KEY)
    assert entry is not None
    assert entry.value == b"elsewhere digest"


@in_virtual_time
async def test_a_learner_finds_its_own_head_and_its_revision(tmp_path: Path):
    ground = Ground(tmp_path)
    genesis = await ground.claim_genesis()
    assert (await find_head(ground.ring(), ground.store())).head is None
    await ground.commit_update(genesis, 3)
    await ground.commit_update(genesis, 5, learner="learner-2")
    resumed = await find_head(ground.ring(), ground.store())
    assert resumed.head is not None
    assert (resumed.head.count, resumed.revision) == (3, 1)


@in_virtual_time
async def test_a_learner_whose_head_has_another_key_stops_at_once(tmp_path: Path):
    """Its identity was lost: nobody would use what it publishes."""
    ground = Ground(tmp_path)
    await ground.commit_update(await ground.claim_genesis(), 3)
    newcomer = Identity("learner-1", an_identity("newcomer").seed)
    ring = Ring(ground.bus(), newcomer, ground.spec, "learner", ground.clock)
    with pytest.raises(FencedError, match="'learner-1' of this run has another key; start this one under"):
        await find_head(ring, ground.store())


@in_virtual_time
async def test_state_comes_back_as_it_was_saved(tmp_path: Path):
    ground = Ground(tmp_path)
    await saved(ground, 3)
    state = await load_state(ground.ring(), ground.store(), ground.offload, a_head(3))
    assert state is not None
    for name, array in a_state(3)().items():
        np.testing.assert_array_equal(state[name], array)
        assert state[name].dtype == array.dtype


@in_virtual_time
async def test_the_newest_state_that_is_not_newer_than_the_head_is_used(tmp_path: Path):
    ground = Ground(tmp_path)
    await saved(ground, 2, 9, 10, 12)
    assert await loaded(ground, 10) == (10, [])


@in_virtual_time
async def test_a_state_older_than_the_head_is_used_and_said(tmp_path: Path):
    ground = Ground(tmp_path)
    await saved(ground, 2)
    assert await loaded(ground, 5) == (2, ["state_is_older_than_head"])


@pytest.mark.parametrize("damage", ["no manifest", "cut", "a file is gone"])
@in_virtual_time
async def test_a_half_written_newest_state_is_passed_over_for_the_one_before(tmp_path: Path, damage: str):
    ground = Ground(tmp_path)
    await saved(ground, 3, 4)
    entry = ground.bucket.entries["test/state/learner-1/4"]
    if damage == "no manifest":
        entry.pop("manifest.json")
    elif damage == "cut":
        entry["optimizer.safetensors"] = entry["optimizer.safetensors"][:-8]
    else:
        entry.pop("optimizer.safetensors")
    steps, warnings = await loaded(ground, 4)
    assert steps == 3
    assert "state_is_older_than_head" in warnings
    assert ("state_skipped" in warnings) == (damage != "no manifest")


@in_virtual_time
async def test_a_store_that_is_only_away_is_waited_for(tmp_path: Path):
    ground = Ground(tmp_path)
    await saved(ground, 3, 4)
    steps, warnings = await loaded(ground, 4, faults=[StoreFault.UNAVAILABLE, StoreFault.HANGING])
    assert (steps, warnings) == (4, ["request_retried"] * 2)


@in_virtual_time
async def test_a_missing_state_is_said(tmp_path: Path):
    assert await loaded(Ground(tmp_path), 4) == (None, ["state_missing"])


@in_virtual_time
async def test_a_state_that_cannot_be_saved_is_told_and_stops_nothing(tmp_path: Path):
    ground = Ground(tmp_path)
    store = ground.store(lambda _op, _path: StoreFault.UNAVAILABLE)
    assert not await save_state(ground.ring(), store, ground.offload, a_head(1), a_state(1))
    assert [event["count"] for event in ground.told("state_unsaved")] == [1]


@in_virtual_time
async def test_two_learners_may_export_the_same_policy(tmp_path: Path):
    ground = Ground(tmp_path)
    factors = FakePolicy().genesis(0)
    for node in ("learner-1", "learner-2"):
        await export(ground.ring(node), ground.store(), ground.offload, a_head(4), factors)
    assert len(ground.told("adapter_exported")) == 2
    assert ground.told("export_refused") == []


@in_virtual_time
async def test_an_export_that_differs_from_the_one_already_there_is_told(tmp_path: Path):
    ground = Ground(tmp_path)
    factors = FakePolicy().genesis(0)
    await export(ground.ring(), ground.store(), ground.offload, a_head(4), factors)
    other = a_head(4).model_copy(update={"policy_digest": "other"})
    await export(ground.ring("learner-2"), ground.store(), ground.offload, other, factors)
    assert len(ground.told("export_refused")) == 1


@in_virtual_time
async def test_what_was_consumed_since_the_newest_upload_is_found_again(tmp_path: Path):
    """By its own head's count, among what peers and its own earlier updates consumed."""
    ground = Ground(tmp_path)
    head = await ground.commit_update(await ground.claim_genesis(), 2)
    values = {
        "learner-1.0": done_value("trained", "learner-1", 1),
        "learner-1.1": done_value("stale", "learner-1", 2),
        "learner-2.7": done_value("trained", "learner-1", 2),
        "learner-1.2": done_value("stale", "learner-2", 2),
    }
    ground.run.buckets[Bucket.POLICY].write(
        [Write(done_key(group), value) for group, value in values.items()]
    )
    resumed = await find_head(ground.ring(), ground.store())
    assert resumed.head == head
    assert resumed.unlisted == {"learner-1.1": "stale", "learner-2.7": "trained"}
