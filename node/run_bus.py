"""A bus that can also create its run, and whether the run is there."""

from __future__ import annotations

from typing import Protocol

import structlog

from protocol.codec import decode_as
from protocol.errors import BusError, OperatorError
from protocol.messages import RunState
from protocol.ports import Bus, Clock
from protocol.runspec import RunSpec
from protocol.subjects import SPEC_KEY, Bucket

WAIT_S = 1.0
"""How often a node that waits for its run looks."""


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


async def wait_for_run(bus: RunBus, run: str, clock: Clock) -> RunState:
    """The run's settings once somebody has created or recovered it, however long that takes."""
    waits = False
    while True:
        try:
            if found := await find_run(bus):
                return found
            why = str(no_run(run))
        except BusError as exc:
            why = str(exc) or type(exc).__name__
        if not waits:
            structlog.get_logger().warning("waiting_for_run", run=run, reason=why)
        waits = True
        await clock.sleep(WAIT_S)


def no_run(run: str) -> OperatorError:
    """What to tell a person whose run this broker does not know."""
    return OperatorError(
        f"no run {run!r} at this broker; create it with: grpo-node create RUN.toml, or, if this broker "
        f"has lost it, restore it with: grpo-node recover RUN.toml"
    )
