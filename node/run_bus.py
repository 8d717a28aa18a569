"""A bus that can also create its run, and whether the run is there."""

from __future__ import annotations

from typing import Protocol

from protocol.codec import decode_as
from protocol.messages import RunState
from protocol.ports import Bus
from protocol.runspec import RunSpec
from protocol.subjects import SPEC_KEY, Bucket


class RunBus(Bus, Protocol):
    """A bus that can also create its run."""

    async def create_run(self, spec: RunSpec, *, queue_messages_max: int = ...) -> None:
        """Create the run's queues and buckets; their revisions are later than in any earlier life of it."""
        ...

    async def exists(self) -> bool:
        """Whether the run was created."""
        ...


async def find_run(bus: RunBus) -> RunState | None:
    """The run's settings as its creator stored them, or None if this broker has no such run."""
    entry = await bus.get(Bucket.RUN, SPEC_KEY) if await bus.exists() else None
    return decode_as(entry.value, RunState) if entry is not None else None
