"""The stores under contract, each with a back door: what a crash, a disk or a stranger may do to it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import nats
from huggingface_hub import HfApi
from nats.js.object_store import ObjectStore

from node.broker_access import BrokerAccess
from node.entry_cache import EntryCache
from node.file_store import FileStore
from node.hub_calls import HubCalls, HubTimes
from node.hub_store import HubStore
from node.memory_store import MemoryBucket, MemoryStore
from node.nats_bus import NatsBus
from node.nats_store import NatsStore
from node.system_clock import SystemClock
from protocol.errors import StoreConflict
from protocol.manifest import Manifest
from protocol.ports import AdapterStore
from tests.hub.buckets import HubBucket
from tests.hub.server import HubServer

HUB_TIMES = HubTimes(http_s=2, call_s=5, first_pause_s=0.02)
"""Impatient, so that tests of faults are quick."""


class World(Protocol):
    """One store that several nodes share."""

    decides: bool
    """Whether of two writers at one moment the store lets exactly one win."""

    def node(self, name: str | None = None) -> AdapterStore:
        """The store as a node sees it when it starts. The copies of a named node outlive it."""
        ...

    def write(self, path: str, name: str, data: bytes) -> None:
        """Put bytes where a file of an entry lies, past every rule."""
        ...

    def read(self, path: str, name: str) -> bytes:
        """What lies there."""
        ...

    def remove(self, path: str, name: str) -> None:
        """Take a file away."""
        ...


T = TypeVar("T")
Contents = tuple[Manifest, dict[str, bytes]]


async def publish_at_once(world: World, entries: Sequence[Contents]) -> int:
    """Which of several entries for one path, with other data, wins by writers of the same moment.

    A store that cannot decide tells at most one of them that it won, and may leave an entry that every reader
    refuses; whoever of them publishes next repairs it.
    """
    results = await asyncio.gather(
        *(world.node().publish(*entry) for entry in entries), return_exceptions=True
    )
    won = [i for i, result in enumerate(results) if result is None]
    assert all(result is None or isinstance(result, StoreConflict) for result in results), results
    if not world.decides:
        assert len(won) <= 1
        won = [i for i, entry in enumerate(entries) if await _published(world, entry)]
    assert len(won) == 1, results
    return won[0]


async def _published(world: World, entry: Contents) -> bool:
    try:
        await world.node().publish(*entry)
    except StoreConflict:
        return False
    return True


def cache_of(directory: Path, name: str | None) -> Path:
    """Where a node keeps its copies; a node without a name starts with none."""
    return directory / f"cache-{name or uuid.uuid4().hex}"


class FileWorld:
    """A shared directory."""

    decides = True

    def __init__(self, directory: Path) -> None:
        self.root = directory / "store"
        self.root.mkdir()
        self._directory = directory

    def node(self, name: str | None = None) -> FileStore:
        return FileStore(self.root, EntryCache(cache_of(self._directory, name)), timeout_s=10)

    def write(self, path: str, name: str, data: bytes) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)
        (self.root / path / name).write_bytes(data)

    def read(self, path: str, name: str) -> bytes:
        return (self.root / path / name).read_bytes()

    def remove(self, path: str, name: str) -> None:
        (self.root / path / name).unlink()


class MemoryWorld:
    """A bucket in memory."""

    decides = True

    def __init__(self, directory: Path) -> None:
        self._bucket = MemoryBucket()
        self._directory = directory

    def node(self, name: str | None = None) -> MemoryStore:
        cache = EntryCache(cache_of(self._directory, name))
        return MemoryStore(self._bucket, cache, SystemClock())

    def write(self, path: str, name: str, data: bytes) -> None:
        self._bucket.entries.setdefault(path, {})[name] = data

    def read(self, path: str, name: str) -> bytes:
        return self._bucket.entries[path][name]

    def remove(self, path: str, name: str) -> None:
        del self._bucket.entries[path][name]


class HubWorld:
    """A bucket on the stand-in of the Hub, and a store in a directory of it."""

    decides = False
    PREFIX = "adapters"
    TOKEN = "hf_alice"

    def __init__(self, directory: Path, hub: HubServer) -> None:
        self.hub = hub
        self.bucket = f"alice/{uuid.uuid4().hex}"
        self.files = hub.buckets.setdefault(self.bucket, HubBucket(self.bucket, private=True)).files
        self._directory = directory
        self._api = HfApi(endpoint=hub.url, token=self.TOKEN)

    def calls(self, token: str = TOKEN, times: HubTimes = HUB_TIMES) -> HubCalls:
        return HubCalls(self.bucket, endpoint=self.hub.url, token=token, times=times)

    def node(self, name: str | None = None, calls: HubCalls | None = None, timeout_s: float = 30) -> HubStore:
        cache = cache_of(self._directory, name)
        return HubStore(calls or self.calls(), self.PREFIX, cache, timeout_s)

    def write(self, path: str, name: str, data: bytes) -> None:
        self._api.batch_bucket_files(self.bucket, add=[(data, self._at(path, name))])

    def read(self, path: str, name: str) -> bytes:
        target = self._directory / uuid.uuid4().hex
        self._api.download_bucket_files(self.bucket, [(self._at(path, name), target)])
        return target.read_bytes()

    def remove(self, path: str, name: str) -> None:
        self._api.batch_bucket_files(self.bucket, delete=[self._at(path, name)])

    def _at(self, path: str, name: str) -> str:
        return f"{self.PREFIX}/{path}/{name}"


class BackDoor:
    """The Object Store as any client of NATS uses it, on a loop of its own so that a test need not wait."""

    def __init__(self, access: BrokerAccess, bucket: str) -> None:
        self._access = access
        self._bucket = bucket

    def use(self, work: Callable[[ObjectStore], Awaitable[T]]) -> T:
        async def connected() -> T:
            client = await nats.connect(self._access.url, token=self._access.token)
            try:
                return await work(await client.jetstream().object_store(self._bucket))
            finally:
                await client.close()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(connected())).result()


class NatsWorld:
    """A run's part of a broker."""

    decides = True

    def __init__(self, directory: Path, bus: NatsBus, door: BackDoor) -> None:
        self._bus = bus
        self._door = door
        self._directory = directory

    def node(self, name: str | None = None) -> NatsStore:
        return self._bus.adapter_store(EntryCache(cache_of(self._directory, name)), timeout_s=10)

    def write(self, path: str, name: str, data: bytes) -> None:
        self._door.use(lambda objects: objects.put(f"{path}/{name}", data))

    def read(self, path: str, name: str) -> bytes:
        found = self._door.use(lambda objects: objects.get(f"{path}/{name}"))
        assert found.data is not None
        return found.data

    def remove(self, path: str, name: str) -> None:
        self._door.use(lambda objects: objects.delete(f"{path}/{name}"))


WORLDS = ("file", "memory", "hub", "nats")
"""The stores under contract; ``conftest.py`` makes them."""
