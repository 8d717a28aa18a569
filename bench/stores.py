"""What does an update cost on its way through each store: publish, fetch by another node, list and delete?

The update is rank 16 on all linear layers of SmolLM2-135M in float32. ``file`` is a directory on this disk,
``nats`` an embedded broker, ``hub`` the stand-in of ``tests/hub`` on this machine with the stock client: what
is measured is our side and the client's, not anybody's network.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

from bench.compose import an_adapter
from bench.harness import Figure, report, say
from node.broker import start_broker
from node.entry_cache import EntryCache
from node.file_store import FileStore
from node.nats_bus import NatsBus
from protocol.identity import Identity
from protocol.manifest import EntryKind, Manifest
from protocol.ports import AdapterStore
from roles.policy.peft_export import factors_bytes

REPEATS = 5
TIMEOUT_S = 60.0
RUN = "bench"

T = TypeVar("T")
Open = Callable[[Path], AdapterStore]
"""The store as a node sees it whose copies lie in a directory of its own."""


def an_entry(count: int) -> tuple[Manifest, dict[str, bytes]]:
    """A signed update with content that no other has."""
    files = {"update.safetensors": factors_bytes(an_adapter(count, 0.02), "float32")}
    path = f"{RUN}/updates/learner-1/{count}-{count:012x}"
    described = Manifest.describe(files)
    manifest = Manifest(path=path, kind=EntryKind.UPDATE, run=RUN, author="learner-1", files=described)
    return manifest.signed(Identity.deterministic("learner-1")), files


async def measured(open_store: Open, directory: Path) -> dict[str, Figure]:
    """Medians in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in ("publish", "fetch", "list", "delete")}

    async def timed(name: str, work: Awaitable[T]) -> T:
        started = time.perf_counter()
        found = await work
        times[name].append((time.perf_counter() - started) * 1e3)
        return found

    writer = open_store(directory / "writer")
    paths = []
    for count in range(REPEATS + 1):
        manifest, files = an_entry(count)
        paths.append(manifest.path)
        await timed("publish", writer.publish(manifest, files))
        copy = await timed("fetch", open_store(directory / f"reader-{count}").fetch(manifest.path))
        assert (copy / "update.safetensors").stat().st_size == manifest.files[0].size
        assert await timed("list", writer.list(f"{RUN}/updates/learner-1")) == sorted(paths)
    for path in paths:
        await timed("delete", writer.delete(path))
    # The first of each opens connections and imports the client.
    return {f"{name}_ms": median(values[1:]) for name, values in times.items()}


async def on_file(directory: Path) -> dict[str, Figure]:
    """A directory."""
    root = directory / "root"
    root.mkdir()
    return await measured(lambda cache: FileStore(root, EntryCache(cache), TIMEOUT_S), directory)


async def on_nats(directory: Path) -> dict[str, Figure]:
    """An embedded broker."""
    broker = start_broker(directory / "broker")
    bus = await NatsBus.connect(broker.access, RUN, node="bench")
    try:
        await bus.create_adapter_store()
        return await measured(lambda cache: bus.adapter_store(EntryCache(cache), TIMEOUT_S), directory)
    finally:
        await bus.close()
        broker.stop()


async def on_hub(directory: Path) -> dict[str, Figure]:
    """The stand-in."""
    os.environ["HF_XET_CACHE"] = str(directory / "xet")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from node.hub_calls import HubCalls
    from node.hub_store import HubStore
    from tests.hub.server import HubServer
    from tests.hub.standin import running

    with running(HubServer()) as hub:
        calls = HubCalls("alice/bench", endpoint=hub.url, token="hf_alice")
        await calls.create(TIMEOUT_S)
        found = await measured(lambda cache: HubStore(calls, "", cache, TIMEOUT_S), directory)
        return found | {"requests": len(hub.requests)}


def main() -> None:
    """Measure and report."""
    size = an_entry(0)[0].files[0].size
    figures: dict[str, Figure] = {"update_bytes": size, "repeats": REPEATS}
    for name, measure in (("file", on_file), ("nats", on_nats), ("hub", on_hub)):
        say(name)
        with tempfile.TemporaryDirectory() as directory:
            found = asyncio.run(measure(Path(directory)))
        figures |= {f"{name}/{what}": value for what, value in found.items()}
    report(figures)


if __name__ == "__main__":
    main()
