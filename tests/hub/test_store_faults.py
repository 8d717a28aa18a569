"""The store on the Hub while requests fail, hang, and are answered by half."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from node.entry_cache import EntryCache
from node.file_store import FileStore
from protocol.errors import StoreDenied, StoreNotFound, StoreUnavailable
from tests.build import an_entry
from tests.contract.stores import HUB_TIMES, HubWorld
from tests.hub.faults import MANY, Fault

PATH = "test/updates/learner-1/1-abc"
DATA = "update.safetensors"
BATCH, SHOWN, XORB = r"POST .*/batch$", r"POST .*/paths-info$", r"GET /cas/xorbs/"


def answered(world: HubWorld, *patterns: str) -> list[str]:
    """Which kinds of requests the Hub met, in order."""
    return [part for line in world.hub.requests for part in patterns if part in line]


async def arrives(world: HubWorld) -> None:
    """Whether an entry goes to the Hub and comes back whole."""
    manifest, files = an_entry(files={DATA: os.urandom(700), "notes.txt": b""})  # nothing known from before
    await world.node().publish(manifest, files)
    assert (await world.node().fetch(PATH) / DATA).read_bytes() == files[DATA]


# --- the order of things -------------------------------------------------------------------------


async def test_data_are_shown_before_the_manifest_is_sent_and_the_manifest_before_success(world: HubWorld):
    await world.node().publish(*an_entry())
    assert answered(world, "/batch", "/paths-info") == ["/paths-info", *2 * ["/batch", "/paths-info"]]


async def test_nothing_is_published_while_the_hub_does_not_show_it(world: HubWorld):
    world.hub.faults.append(Fault(SHOWN, hidden=True, skip=1, count=3))
    await arrives(world)
    assert answered(world, "/paths-info")[:5] == 5 * ["/paths-info"]


async def test_what_the_hub_never_shows_is_not_published(world: HubWorld):
    world.hub.faults.append(Fault(SHOWN, hidden=True, skip=1, count=MANY))
    with pytest.raises(StoreUnavailable, match=r"does not show|did not answer"):
        await world.node(timeout_s=1).publish(*an_entry())
    with pytest.raises(StoreNotFound):
        await world.node().fetch(PATH)


async def test_a_publisher_that_comes_back_sends_only_what_is_missing(world: HubWorld):
    world.hub.faults.append(Fault(BATCH, status=403, skip=1))
    with pytest.raises(StoreDenied, match="right to write"):
        await world.node().publish(*an_entry())
    with pytest.raises(StoreNotFound):
        await world.node().fetch(PATH)
    world.hub.requests.clear()
    await world.node().publish(*an_entry())
    assert answered(world, "/batch") == ["/batch"]


async def test_pages_of_a_listing_are_put_together(world: HubWorld):
    world.hub.page = 2
    paths = [f"test/updates/learner-1/{count}-abc" for count in range(5)]
    for path in paths:
        await world.node().publish(*an_entry(path))
    assert await world.node().list("test") == paths
    await world.node().fetch(paths[3])


# --- faults that pass ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault(BATCH, status=500),
        Fault(BATCH, status=429, headers={"Retry-After": "1"}),
        Fault(SHOWN, status=503),
        Fault(r"GET .*/tree", status=500),
        Fault(r"xet-write-token", status=500),
        Fault(r"xet-read-token", status=502),
        Fault(r"POST /cas/v1/xorbs", status=500),
        Fault(r"POST /cas/v1/shards", status=503),
        Fault(r"GET /cas/v2/reconstructions", status=500),
        Fault(XORB, status=403),
        Fault(BATCH, lost=True),
        Fault(BATCH, lost=True, skip=1),
        Fault(BATCH, torn=1),
        Fault(BATCH, partial=1),
        Fault(r"POST /cas/v1/shards", lost=True),
        Fault(XORB, lost=True),
        Fault(XORB, short=300),
        Fault(SHOWN, stall=True),
        Fault(BATCH, stall=True),
        Fault(r"HEAD ", stall=True),
        Fault(r"POST /cas/v1/xorbs", stall=True),
        Fault(XORB, stall=True),
        Fault(r"xet-write-token", stall=True),
    ],
    ids=lambda fault: f"{fault.match} {fault.status or ''}{[k for k, v in vars(fault).items() if v is True]}",
)
async def test_a_fault_that_passes_is_waited_out(world: HubWorld, fault: Fault):
    world.hub.faults.append(fault)
    await arrives(world)
    assert fault.hit.is_set()


async def test_an_upload_whose_last_answer_never_comes_is_sent_again(world: HubWorld):
    world.hub.faults.append(Fault(r"POST /cas/v1/shards", stall=True))
    calls = world.calls(times=replace(HUB_TIMES, call_s=2))
    await world.node(calls=calls, timeout_s=12).publish(*an_entry())
    assert (await world.node().fetch(PATH) / DATA).stat().st_size == 700


async def test_every_third_request_may_fail(world: HubWorld):
    world.hub.faults.append(Fault(r"/api/", status=500, every=3, count=MANY))
    await arrives(world)


async def test_a_bucket_is_made_after_the_time_that_the_hub_asked_for(world: HubWorld):
    loop = asyncio.get_running_loop()
    world.bucket = f"{world.bucket}-new"
    world.hub.faults.append(
        Fault(r"POST /api/buckets/[^/]*/[^/]*$", status=429, headers={"Retry-After": "1"})
    )
    started = loop.time()
    assert await world.calls().create(10)
    assert loop.time() - started >= 1
    assert world.hub.buckets[world.bucket].private
    assert not await world.calls().create(10)


# --- faults that stay ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault(r"/api/", stall=True, count=MANY),
        Fault(r"GET .*/tree", status=500, count=MANY),
        Fault(XORB, status=500, count=MANY),
        Fault(XORB, short=300, count=MANY),
    ],
    ids=["stall", "500", "xorb-500", "short"],
)
async def test_a_fault_that_stays_is_unavailable_in_time_and_harms_no_copy(
    world: HubWorld, tmp_path: Path, fault: Fault
):
    good, bad = PATH, "test/updates/learner-1/2-def"
    for path in (good, bad):
        await world.node().publish(*an_entry(path))
    reader = world.node("reader", world.calls(times=replace(HUB_TIMES, call_s=0.5)), 2)
    directory = await reader.fetch(good)
    world.hub.faults.append(fault)
    with pytest.raises(StoreUnavailable) as failed:
        await reader.fetch(bad)
    assert "\n" not in str(failed.value)
    assert (directory / DATA).stat().st_size == 700
    final = [path for path in (tmp_path / "cache-reader").rglob("*") if ".staging" not in path.parts]
    assert {path.name for path in final if path.is_dir() and path.name[0].isdigit()} == {"1-abc"}


async def test_a_hub_that_hangs_stops_nothing_else(world: HubWorld, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    disk = FileStore(tmp_path / "disk", EntryCache(tmp_path / "copies"), 10)
    fault = Fault(r"GET .*/tree", stall=True, count=MANY)
    world.hub.faults.append(fault)
    store = world.node(timeout_s=3)
    hanging = [asyncio.create_task(store.fetch(f"test/{i}")) for i in range(20)]
    await asyncio.to_thread(fault.hit.wait, 10)
    await disk.publish(*an_entry())
    await disk.fetch(PATH)
    assert not any(task.done() for task in hanging)
    found = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in found), found
