"""The faults of the store in memory: each does what a real store may do, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.entry_cache import EntryCache
from node.memory_store import MemoryBucket, MemoryStore, StoreFault
from protocol.errors import StoreCorrupt, StoreError, StoreNotFound, StoreUnavailable
from tests.build import an_entry

PATH = "test/updates/learner-1/1-abc"


class CountingClock:
    """A clock whose sleeps take no time and are added up."""

    slept = 0.0

    def monotonic(self) -> float:
        return self.slept

    def wall(self) -> float:
        return self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds


class Swarm:
    """A bucket, and nodes that see it with one fault each."""

    def __init__(self, directory: Path) -> None:
        self.bucket = MemoryBucket()
        self.clock = CountingClock()
        self._directory = directory

    def node(self, fault: StoreFault | None = None, at: str = "") -> MemoryStore:
        cache = EntryCache(self._directory / f"{fault}-{at}")
        return MemoryStore(
            self.bucket, cache, self.clock, faults=lambda operation, _: fault if operation == at else None
        )


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path)


async def test_a_torn_publish_leaves_nothing_to_see_and_can_be_repeated(swarm: Swarm):
    with pytest.raises(StoreUnavailable):
        await swarm.node(StoreFault.TORN, "publish").publish(*an_entry())
    with pytest.raises(StoreNotFound):
        await swarm.node().fetch(PATH)
    await swarm.node().publish(*an_entry())
    await swarm.node().fetch(PATH)


async def test_a_lost_acknowledgement_is_settled_by_publishing_again(swarm: Swarm):
    with pytest.raises(StoreUnavailable):
        await swarm.node(StoreFault.LOST_ACK, "publish").publish(*an_entry())
    await swarm.node().publish(*an_entry())
    assert await swarm.node().list("") == [PATH]


async def test_a_delete_whose_acknowledgement_is_lost_took_effect(swarm: Swarm):
    await swarm.node().publish(*an_entry())
    with pytest.raises(StoreUnavailable):
        await swarm.node(StoreFault.LOST_ACK, "delete").delete(PATH)
    assert await swarm.node().list("") == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (StoreFault.TORN, StoreCorrupt),
        (StoreFault.CORRUPT, StoreCorrupt),
        (StoreFault.MISSING, StoreNotFound),
        (StoreFault.UNAVAILABLE, StoreUnavailable),
        (StoreFault.HANGING, StoreUnavailable),
    ],
)
async def test_a_faulty_fetch_fails_and_the_next_succeeds(
    swarm: Swarm, fault: StoreFault, error: type[StoreError]
):
    await swarm.node().publish(*an_entry())
    with pytest.raises(error):
        await swarm.node(fault, "fetch").fetch(PATH)
    await swarm.node(fault).fetch(PATH)


@pytest.mark.parametrize("fault", [StoreFault.UNAVAILABLE, StoreFault.HANGING])
async def test_an_unavailable_store_publishes_nothing(swarm: Swarm, fault: StoreFault):
    with pytest.raises(StoreUnavailable):
        await swarm.node(fault, "publish").publish(*an_entry())
    assert swarm.bucket.entries == {}


async def test_slow_calls_take_the_clocks_time(swarm: Swarm):
    await swarm.node(StoreFault.SLOW, "publish").publish(*an_entry())
    assert swarm.clock.slept == 5.0
    with pytest.raises(StoreUnavailable):
        await swarm.node(StoreFault.HANGING, "list").list("")
    assert swarm.clock.slept == 15.0
