"""The merger: peers' updates come in the background, and a slow or broken one holds up nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS, VectorClock
from roles.learner.merger import Merger
from roles.learner.witness import Witness
from roles.policy.compose import Factors
from roles.policy.follower import POLL_S
from roles.policy.policies import Policies
from tests.build import a_clock
from tests.ground import Ground, running


class Desk:
    """A merger, and peers that commit."""

    def __init__(self, directory: Path) -> None:
        self.ground = Ground(directory)
        self.broken: set[str] = set()
        self.genesis: Factors = {}
        self.merged = GENESIS
        self.arrived = asyncio.Event()

    async def begin(self) -> Merger:
        self.genesis = await self.ground.claim_genesis()
        ring = self.ground.ring()
        store = self.ground.store(self._fault)
        policies = Policies(ring, store, self.ground.offload)
        await policies.start()
        return Merger(ring, policies, Witness(ring, store), lambda: self.merged, self.arrived)

    async def commit(self, learner: str, count: int) -> None:
        await self.ground.commit_update(self.genesis, count, learner=learner)

    def _fault(self, _operation: str, path: str) -> StoreFault | None:
        return StoreFault.UNAVAILABLE if any(f"/{who}/" in path for who in self.broken) else None


def counts(merger: Merger, clock: VectorClock = GENESIS) -> dict[str, int]:
    return {update.manifest.author: update.manifest.count for update in merger.take(clock)}


@in_virtual_time
async def test_a_peers_update_is_there_soon_after_its_commit_and_is_taken_once(tmp_path: Path):
    desk = Desk(tmp_path)
    merger = await desk.begin()
    async with running(merger):
        await desk.ground.clock.sleep(1.0)
        await desk.commit("b", 1)
        await desk.arrived.wait()
        assert desk.ground.clock.monotonic() < POLL_S
        assert (counts(merger), counts(merger)) == ({"b": 1}, {})


@in_virtual_time
async def test_a_learner_whose_update_cannot_be_had_does_not_keep_the_others_out(tmp_path: Path):
    desk = Desk(tmp_path)
    merger = await desk.begin()
    desk.broken.add("b")
    await desk.commit("b", 1)
    await desk.commit("c", 1)
    async with running(merger):
        await desk.arrived.wait()
        assert counts(merger) == {"c": 1}
        desk.arrived.clear()
        desk.broken.clear()
        await desk.arrived.wait()
        assert counts(merger) == {"b": 1}


@in_virtual_time
async def test_an_update_that_is_refused_is_told_once_with_the_reason_and_a_delay_is_not(tmp_path: Path):
    desk = Desk(tmp_path)
    merger = await desk.begin()
    desk.broken.add("c")
    await desk.commit("c", 1)
    await desk.ground.commit_update(desk.genesis, 1, learner="b", data=b"noise")
    async with running(merger):
        await desk.ground.clock.sleep(10 * POLL_S)
    (told,) = desk.ground.told("update_rejected")
    assert (told["update"], told["kind"]) == ("b:1", "StoreCorrupt")
    assert "not a safetensors file" in str(told["reason"])


@in_virtual_time
async def test_only_the_newest_of_a_peer_is_handed_over(tmp_path: Path):
    desk = Desk(tmp_path)
    merger = await desk.begin()
    async with running(merger):
        for count in (1, 2, 3):
            await desk.commit("b", count)
            await desk.ground.clock.sleep(1.0)
        assert counts(merger) == {"b": 3}


@in_virtual_time
async def test_what_was_merged_by_other_ways_is_not_handed_over(tmp_path: Path):
    desk = Desk(tmp_path)
    merger = await desk.begin()
    await desk.commit("b", 1)
    async with running(merger):
        await desk.arrived.wait()
        assert counts(merger, a_clock(b=1)) == {}


@in_virtual_time
async def test_what_a_roll_back_took_away_is_fetched_again(tmp_path: Path):
    desk = Desk(tmp_path)
    merger = await desk.begin()
    await desk.commit("b", 1)
    async with running(merger):
        await desk.arrived.wait()
        assert counts(merger) == {"b": 1}
        desk.merged = a_clock(b=1)
        merger.wake.set()
        await desk.ground.clock.sleep(1.0)
        assert counts(merger) == {}
        desk.merged = GENESIS
        merger.wake.set()
        await desk.ground.clock.sleep(1.0)
        assert counts(merger) == {"b": 1}
