"""The store in the broker: what only a broker can do to it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from node.entry_cache import EntryCache
from node.nats_bus import NatsBus
from node.nats_link import Link
from node.nats_objects import Objects
from protocol.errors import StoreDenied, StoreUnavailable, UnknownOutcome
from tests.build import an_entry
from tests.node.sites import Site

PATH = "test/updates/learner-1/1-abc"
DATA = "update.safetensors"


async def a_bus(site: Site) -> NatsBus:
    bus = await NatsBus.connect(site.broker.access, "test", node="node-1")
    await bus.create_adapter_store()
    return bus


async def test_entries_outlive_the_brokers_restart_and_an_empty_one_is_told_apart(site: Site, tmp_path: Path):
    bus = await a_bus(site)
    manifest, files = an_entry(files={DATA: bytes(range(256)) * 4000})
    await bus.adapter_store(EntryCache(tmp_path / "a"), 10).publish(manifest, files)
    site.end(signal.SIGKILL)
    site.start()
    store = bus.adapter_store(EntryCache(tmp_path / "b"), 20)
    assert (await store.fetch(PATH) / DATA).read_bytes() == files[DATA]
    other = await NatsBus.connect(site.broker.access, "other", node="node-1")
    with pytest.raises(StoreDenied, match="holds no adapters of this run"):
        await other.adapter_store(EntryCache(tmp_path / "c"), 10).list("")
    await other.close()
    await bus.close()


async def test_a_broker_that_is_away_is_unavailable_in_time(site: Site, tmp_path: Path):
    bus = await a_bus(site)
    site.end(signal.SIGTERM)
    with pytest.raises(StoreUnavailable, match="object store"):
        await bus.adapter_store(EntryCache(tmp_path / "a"), 0.3).publish(*an_entry())
    await bus.close()


async def test_an_acknowledgement_that_is_lost_is_settled_by_looking(site: Site, tmp_path: Path):
    class Deaf(Link):
        """Does not hear the first answer to a batch's last message."""

        heard = False

        async def store(self, subject, data, headers=None):
            answer = await super().store(subject, data, headers)
            if headers and "Nats-Batch-Commit" in headers and not self.heard:
                self.heard = True
                raise UnknownOutcome("lost")
            return answer

    bus = await a_bus(site)
    link = await Deaf.open(site.broker.access, "node-2")
    manifest, files = an_entry()
    deaf = NatsBus(link, "test", "node-2").adapter_store(EntryCache(tmp_path / "a"), 10)
    await deaf.publish(manifest, files)
    assert isinstance(link, Deaf)
    assert link.heard
    assert (await bus.adapter_store(EntryCache(tmp_path / "b"), 10).fetch(PATH) / DATA).exists()
    await link.close()
    await bus.close()


async def test_a_deleted_entry_leaves_nothing_in_the_broker(site: Site, tmp_path: Path):
    bus = await a_bus(site)
    link = await Link.open(site.broker.access, "node-2")
    store = bus.adapter_store(EntryCache(tmp_path / "a"), 10)
    await store.publish(*an_entry())
    await store.delete(PATH)
    async with asyncio.timeout(10):
        while await messages(link):
            await asyncio.sleep(0)
    assert await Objects(link, "grpo_test_adapters").names() == []
    await link.close()
    await bus.close()


async def messages(link: Link) -> int:
    info = await link.read_api("STREAM.INFO.OBJ_grpo_test_adapters")
    return int(info["state"]["messages"])
