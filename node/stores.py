"""From a store's URL to the adapter that speaks to it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from node.entry_cache import EntryCache
from node.file_store import FileStore
from protocol.errors import OperatorError
from protocol.ports import AdapterStore, Bus
from protocol.store_spec import StoreSpec

SUPPORTED = (
    "file:///absolute/path (a directory that all nodes can reach), hf://buckets/NAMESPACE/BUCKET[/PREFIX] "
    "(a bucket on the Hub) or nats:// (the broker's object store)"
)

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB = re.compile(rf"hf://buckets/({_NAME}/{_NAME})((?:/{_NAME})*)/?")


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A shared directory."""

    root: Path


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A bucket on the Hub: ``<namespace>/<name>``, and a directory in it or an empty text."""

    bucket: str
    prefix: str


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """The object store of the run's own broker."""


Place = FilePlace | HubPlace | BrokerPlace


def store_place(store: StoreSpec) -> Place:
    """What a URL names. Raises OperatorError, which lists the supported forms, if that is nothing."""
    url = urlsplit(store.url)
    if url.scheme == "file":
        if url.netloc not in {"", "localhost"} or not url.path.startswith("/") or url.query or url.fragment:
            raise OperatorError(f"store.url: {store.url!r} does not name an absolute path; use {SUPPORTED}")
        return FilePlace(Path(unquote(url.path)))
    if url.scheme == "hf":
        if (parts := _HUB.fullmatch(store.url)) is None:
            raise OperatorError(f"store.url: {store.url!r} does not name a bucket; use {SUPPORTED}")
        return HubPlace(parts[1], parts[2].strip("/"))
    if url.scheme == "nats":
        if store.url.rstrip("/") != "nats:":
            raise OperatorError(
                f"store.url: {store.url!r}: the broker is said by --broker; use plain nats://"
            )
        return BrokerPlace()
    raise OperatorError(f"store.url: {store.url!r} is no store; use {SUPPORTED}")


def open_store(spec: StoreSpec, cache_dir: Path, bus: Bus | None = None) -> AdapterStore:
    """The store that ``spec.url`` names; its local copies lie below ``cache_dir``. No I/O yet.

    ``bus`` is the node's connection, of which ``nats://`` is a part. Raises OperatorError.
    """
    place = store_place(spec)
    if isinstance(place, FilePlace):
        return FileStore(place.root, EntryCache(cache_dir), spec.timeout_s)
    if isinstance(place, HubPlace):
        from node.hub_calls import HubCalls
        from node.hub_store import HubStore

        return HubStore(HubCalls(place.bucket), place.prefix, cache_dir, spec.timeout_s)
    from node.nats_bus import NatsBus

    if not isinstance(bus, NatsBus):
        raise OperatorError("store.url: nats:// lies in a run's broker; say which with --broker and --run")
    return bus.adapter_store(EntryCache(cache_dir), spec.timeout_s)


async def create_store(spec: StoreSpec, bus: Bus | None = None) -> None:
    """Make a new run's directory, or its part of the broker; nodes that join later must find it (a missing
    mount is a fault, not an empty store). A bucket is somebody's property: ``create_bucket`` makes it.

    Raises OperatorError if it cannot be made.
    """
    place = store_place(spec)
    if isinstance(place, FilePlace):
        try:
            await asyncio.to_thread(place.root.mkdir, parents=True, exist_ok=True)
        except OSError as exc:
            raise OperatorError(f"store.url: cannot make {place.root}: {exc.strerror}") from exc
    elif isinstance(place, BrokerPlace):
        from node.nats_bus import NatsBus

        assert isinstance(bus, NatsBus)
        await bus.create_adapter_store()


async def create_bucket(spec: StoreSpec) -> bool:
    """Make the bucket of a store on the Hub, private; False if it is there already.

    Raises OperatorError for another store, StoreDenied, StoreUnavailable.
    """
    place = store_place(spec)
    if not isinstance(place, HubPlace):
        raise OperatorError(f"--create-bucket: {spec.url!r} is no bucket on the Hub")
    from node.hub_calls import HubCalls

    return await HubCalls(place.bucket).create(spec.timeout_s)
