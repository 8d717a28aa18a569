"""One peer in a process of its own: prints the digest of the policy that it composes.

python -m tests.roles.learner.composing_peer files <dtype> <genesis> <learner>=<update> …
python -m tests.roles.learner.composing_peer store <dtype> <store> <cache> <genesis> <learner>=<head> …
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from node.entry_cache import EntryCache
from node.file_store import FileStore
from node.memory_broker import MemoryBroker
from node.memory_bus import MemoryBus
from node.system_clock import SystemClock
from protocol.subjects import GENESIS_KEY, Bucket, head_key
from roles.policy.compose import compose, factors_digest
from roles.policy.peft_export import read_factors
from roles.policy.policies import Policies
from roles.ring import Ring
from tests.build import a_runspec, an_identity

T = TypeVar("T")


async def offload(work: Callable[[], T]) -> T:
    """In line: there is nobody else here."""
    return work()


def from_files(dtype: Any, genesis: str, updates: Sequence[str]) -> str:
    """Compose the files in hand, read in the order given."""
    named = dict(update.split("=", 1) for update in updates)
    found = {learner: read_factors(Path(path), dtype) for learner, path in named.items()}
    return factors_digest(compose(read_factors(Path(genesis)), found))


async def from_store(dtype: Any, store: str, cache: str, genesis: str, heads: Sequence[str]) -> str:
    """Follow the heads, put to a broker in the order given, to the policy of them all."""
    spec, clock = a_runspec(learner={"update_dtype": dtype}), SystemClock()
    broker = MemoryBroker(clock)
    broker.create(spec, 1000)
    bus = MemoryBus(broker, spec.name, node="sampler-1")
    await bus.put(Bucket.RUN, GENESIS_KEY, genesis.encode())
    for head in heads:
        learner, path = head.split("=", 1)
        await bus.put(Bucket.POLICY, head_key(learner), Path(path).read_bytes())
    ring = Ring(bus, an_identity("sampler-1"), spec, "sampler", clock)
    policies = Policies(ring, FileStore(Path(store), EntryCache(Path(cache)), 10.0), offload)
    await policies.start()
    return (await policies.at(await policies.read_heads())).digest


def main(how: str, *arguments: str) -> str:
    """What to print."""
    if how == "files":
        return from_files(arguments[0], arguments[1], arguments[2:])
    dtype, store, cache, genesis, *heads = arguments
    return asyncio.run(from_store(dtype, store, cache, genesis, heads))


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]) + "\n")
