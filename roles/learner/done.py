"""The ``done`` keys: what became of each group, by whom; written once, in the same batch as a head."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.limits import DONE_TTL_S
from protocol.ports import Bus, Write
from protocol.subjects import Bucket, done_key
from roles.policy.chains import UNCERTAIN

Consumed = Mapping[str, str]
"""Groups of one commit: the outcome by group id."""


async def is_done(bus: Bus, group_id: str) -> bool:
    """Whether somebody consumed a group. Raises BusError."""
    return await bus.get(Bucket.POLICY, done_key(group_id)) is not None


def done_write(group_id: str, outcome: str, learner: str, count: int, expected: int | None = None) -> Write:
    """Mark a group as consumed; ``expected`` 0: by nobody before."""
    return Write(done_key(group_id), done_value(outcome, learner, count), expected, DONE_TTL_S)


def done_value(outcome: str, learner: str, count: int) -> bytes:
    """Value of a group's ``done`` key: what became of it, by whom, and after how many of its updates."""
    return f"{outcome} {learner}:{count}".encode()


def outcome_of(value: bytes) -> str:
    """The outcome in a ``done`` key's value."""
    return value.decode(errors="replace").partition(" ")[0]


async def done_again(
    bus: Bus, learner: str, count: int, consumed: Consumed
) -> tuple[list[Write], dict[str, str]]:
    """For a broker that was restored from the bucket: what marks ``consumed`` where nobody knows better, and
    those of them that somebody else has consumed since. Raises BusError."""
    writes: list[Write] = []
    taken: dict[str, str] = {}
    for group, outcome in consumed.items():
        there = await bus.get(Bucket.POLICY, done_key(group))
        if there is not None and outcome_of(there.value) != UNCERTAIN:
            taken[group] = outcome
        else:
            writes.append(done_write(group, outcome, learner, count, there.revision if there else 0))
    return writes, taken
