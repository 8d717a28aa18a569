"""Retention: which of a learner's own updates nobody can need any more (pure).

kept      the newest ``keep_updates``
kept      what is younger than the grace period
kept      what a live peer's presence names, and what its evaluations are pinned to
kept      what a group may have been sampled under that some live learner would still train on
kept      what lists a task that its learner has not settled: after a loss of the broker's disk only
the manifest tells that it was consumed
deleted   the rest, oldest first
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from protocol.clock import VectorClock
from roles.learner.outstanding import task_of
from roles.policy.compose import VERSION_ROUNDING


@dataclass(frozen=True, slots=True)
class Stored:
    """One of a learner's own updates in the store."""

    path: str
    count: int
    weight: float
    """Summed weights of the learner's updates, this one included."""
    groups: tuple[str, ...]
    """Everything it consumed."""
    seen_at: float
    """When this process first knew of it, in seconds of its clock."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the others may still ask for."""

    named: Sequence[VectorClock]
    """Clocks that live peers hold or are pinned to."""
    learners: Sequence[VectorClock]
    """Clocks of live learners."""
    floors: Mapping[str, int]
    """By learner, dead ones included: below this number every task of it is settled."""


def expendable(
    own: Sequence[Stored],
    learner: str,
    needs: Needs,
    *,
    keep: int,
    grace_s: float,
    max_staleness: float,
    now: float,
) -> list[Stored]:
    """Updates of ``learner`` that may be deleted; ``own`` holds all of them, oldest first."""
    if len(own) <= keep:
        return []
    named = {clock[learner] for clock in needs.named}
    oldest_in_use = min((clock[learner] for clock in needs.learners), default=own[-1].count)
    in_use = next((stored.weight for stored in own if stored.count >= oldest_in_use), own[-1].weight)
    return [
        stored
        for stored in own[:-keep]
        if now - stored.seen_at >= grace_s
        and stored.count not in named
        and in_use - stored.weight > max_staleness + VERSION_ROUNDING
        and not _unsettled(stored.groups, needs.floors)
    ]


def _unsettled(groups: Iterable[str], floors: Mapping[str, int]) -> bool:
    """Whether a group stands at or above its learner's floor."""
    tasks = filter(None, map(task_of, groups))
    return any(number >= floors.get(learner, 0) for learner, number in tasks)
