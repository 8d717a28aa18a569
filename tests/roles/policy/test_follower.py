"""The follower: always at the newest usable policy, never at a bad one, and nobody waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time
from protocol.errors import EngineError
from roles.policy.compose import Factors
from roles.policy.follower import POLL_S, RETRY_FIRST_S, Arrival, PolicyFollower
from roles.policy.policies import Policies, PolicyVersion
from tests.build import a_clock
from tests.ground import FaultyBus, Ground, running


class Scene:
    """A follower with genesis claimed, and what it was given."""

    def __init__(self, ground: Ground, genesis: Factors) -> None:
        self.ground, self.genesis = ground, genesis
        self.bus: FaultyBus = ground.bus("sampler-1")
        self.troubles: list[StoreFault] = []
        self.refuse: set[str] = set()
        self.loaded: list[str] = []
        self.arrivals: list[Arrival] = []
        self.slow_s = 0.0
        """What loading takes."""
        ring = ground.ring("sampler-1", self.bus)
        store = ground.store(lambda op, path: self.troubles.pop(0) if self._is_due(op, path) else None)
        self.follower = PolicyFollower(ring, Policies(ring, store, ground.offload), self._on_policy)

    @classmethod
    async def at(cls, directory: Path) -> Scene:
        ground = Ground(directory)
        return cls(ground, await ground.claim_genesis())

    @property
    def clock(self) -> str:
        return self.follower.current.clock.text if self.follower.current else "nothing"

    async def commit(self, count: int, learner: str = "learner-1", data: bytes | None = None) -> None:
        await self.ground.commit_update(self.genesis, count, learner=learner, data=data)

    async def pass_time(self, seconds: float = 0.1) -> None:
        await self.ground.clock.sleep(seconds)

    def _is_due(self, operation: str, path: str) -> bool:
        return operation == "fetch" and "/updates/" in path and bool(self.troubles)

    async def _on_policy(self, policy: PolicyVersion, arrival: Arrival) -> None:
        if policy.clock.text in self.refuse:
            raise EngineError("out of memory")
        self.loaded.append(policy.clock.text)
        self.arrivals.append(arrival)
        await self.ground.clock.sleep(self.slow_s)


@in_virtual_time
async def test_it_begins_at_genesis_and_follows_announcements_at_once(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.pass_time()
        assert scene.clock == "genesis"
        for count in (1, 2):
            await scene.commit(count)
            await scene.pass_time()
    assert scene.loaded == ["genesis", "learner-1:1", "learner-1:2"]


@in_virtual_time
async def test_a_late_joiner_needs_no_history(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    for count in (1, 2, 3):
        await scene.commit(count)
    async with running(scene.follower):
        await scene.pass_time()
    assert scene.loaded == ["learner-1:3"]


@in_virtual_time
async def test_an_announcement_that_was_missed_is_made_good_by_the_slow_poll(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.pass_time()
        scene.ground.run.announcements.clear()
        await scene.commit(1)
        await scene.pass_time(POLL_S - 1)
        assert scene.clock == "genesis"
        await scene.pass_time(2)
        assert scene.clock == "learner-1:1"


@in_virtual_time
async def test_a_corrupt_update_is_reported_once_and_the_previous_policy_stays(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.commit(1)
        await scene.pass_time()
        await scene.commit(2, data=b"noise")
        await scene.pass_time(10 * POLL_S)
        assert scene.clock == "learner-1:1"
        (told,) = scene.ground.told("update_rejected")
        assert (told["update"], told["kind"]) == ("learner-1:2", "StoreCorrupt")
        assert "not a safetensors file" in str(told["reason"])
        await scene.commit(3)
        await scene.pass_time()
        assert scene.clock == "learner-1:3"


@in_virtual_time
async def test_one_learners_bad_update_does_not_keep_it_from_following_the_others(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.commit(1, "learner-2", data=b"noise")
        await scene.pass_time()
        await scene.commit(1)
        await scene.pass_time()
        assert scene.clock == "learner-1:1"
        await scene.commit(2, "learner-2")
        await scene.pass_time()
        assert scene.clock == "learner-1:1,learner-2:2"


@in_virtual_time
async def test_a_download_that_failed_is_repeated_soon(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.pass_time()
        scene.troubles += [StoreFault.UNAVAILABLE, StoreFault.CORRUPT, StoreFault.MISSING]
        await scene.commit(1)
        await scene.pass_time(POLL_S / 2)
        assert scene.clock == "learner-1:1"
    assert scene.arrivals[-1].waited_s == pytest.approx(RETRY_FIRST_S * (1 + 2 + 4))


@in_virtual_time
async def test_an_arrival_tells_how_long_an_older_policy_was_in_its_way(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    scene.slow_s = 2.0
    async with running(scene.follower):
        await scene.pass_time(3.0)
        await scene.commit(1)
        await scene.pass_time(3.0)
        await scene.commit(2)
        await scene.pass_time(0.5)
        await scene.commit(3)
        await scene.pass_time(5.0)
    assert scene.loaded == ["genesis", "learner-1:1", "learner-1:2", "learner-1:3"]
    assert [arrival.waited_s for arrival in scene.arrivals] == pytest.approx([0, 0, 0, 1.5], abs=0.01)


@in_virtual_time
async def test_a_policy_that_the_engine_refuses_leaves_the_previous_one(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.pass_time()
        scene.refuse.add("learner-1:1")
        await scene.commit(1)
        await scene.pass_time()
        assert scene.clock == "genesis"
        assert [told["kind"] for told in scene.ground.told("update_rejected")] == ["EngineError"]
        await scene.commit(2)
        await scene.pass_time()
        assert scene.clock == "learner-1:2"


@in_virtual_time
async def test_a_broker_that_is_away_costs_nothing_but_news(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.pass_time()
        scene.bus.away = True
        await scene.commit(1)
        await scene.pass_time(60.0)
        assert scene.clock == "genesis"
        scene.bus.away = False
        await scene.pass_time(POLL_S + 1)
        assert scene.clock == "learner-1:1"


@in_virtual_time
async def test_who_waits_for_a_clock_is_woken_when_it_is_reached(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.pass_time()
        scene.ground.run.announcements.clear()
        reaching = asyncio.ensure_future(scene.follower.reach(a_clock(**{"learner-1": 1})))
        await scene.pass_time()
        assert not reaching.done()
        await scene.commit(2)
        assert (await reaching).clock.text == "learner-1:2"


@in_virtual_time
async def test_waiting_for_a_clock_looks_at_once_instead_of_at_the_next_poll(tmp_path: Path):
    scene = await Scene.at(tmp_path)
    async with running(scene.follower):
        await scene.pass_time()
        scene.ground.run.announcements.clear()
        await scene.commit(1)
        began = scene.ground.clock.monotonic()
        await scene.follower.reach(a_clock(**{"learner-1": 1}))
        assert scene.ground.clock.monotonic() - began < 1.0


@in_virtual_time
async def test_it_waits_for_a_genesis_that_is_not_claimed_yet(tmp_path: Path):
    ground = Ground(tmp_path)
    scene = Scene(ground, {})
    async with running(scene.follower):
        await scene.pass_time(30.0)
        assert scene.clock == "nothing"
        await ground.claim_genesis()
        await scene.pass_time(1.0)
        assert scene.clock == "genesis"
