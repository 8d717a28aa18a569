"""Admission: how many tasks to issue so that generation is paced, not wasted (pure).

In flight is what the broker reports; nobody keeps a ledger. With ``max_staleness = 0`` one update's
worth of groups is in flight and the ring is synchronous.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.ports import QueueDepth


def groups_in_flight(depths: Iterable[QueueDepth]) -> int:
    """Groups anywhere between issue and commit: pending plus unacknowledged in every queue.

    A group that is being passed on is counted twice for a moment, never missed.
    """
    return sum(depth.total for depth in depths)


def tasks_to_issue(
    in_flight: int, *, max_staleness: int, publish_every: int, groups_per_update: int, learners: int
) -> int:
    """One learner's share of the room below the admission bound,
    ``(max_staleness + publish_every) * groups_per_update * learners`` groups.

    A learner holds ``publish_every`` steps of groups before their commit frees their places, so with less
    than that it would wait for ever. With ``publish_every`` 1 this is the familiar ``max_staleness + 1``.
    """
    learners = max(1, learners)
    bound = (max_staleness + publish_every) * groups_per_update * learners
    return max(0, -(-(bound - in_flight) // learners))
