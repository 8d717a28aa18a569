"""The buffer: verified groups that wait for a step; takes the oldest first, drops whole groups (pure)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.clock import VectorClock
from protocol.messages import RolloutGroup, Task, VerifiedGroup
from protocol.ports import Delivery
from protocol.reasons import DropReason

MINIMUM_SCORED = 2
"""A baseline needs two scored rollouts."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A verified group in this learner's hands, unacknowledged until it is committed."""

    task: Task
    group: RolloutGroup
    verified: VerifiedGroup
    delivery: Delivery
    version: float
    """Summed weights of all updates in the clock under which the group started."""

    @property
    def group_id(self) -> str:
        """Derived from the task, so that a resend is the same group."""
        return self.group.group_id

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """One per rollout; None where it could not be scored."""
        return tuple(verdict.reward for verdict in self.verified.verdicts)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that will be committed as consumed without training."""

    group_id: str
    reason: DropReason
    delivery: Delivery


class Buffer:
    """Groups by id, in order of arrival."""

    def __init__(self, max_staleness: float) -> None:
        """``max_staleness`` counts versions; a group exactly that old is still used."""
        self._max_staleness = max_staleness
        self._held: OrderedDict[str, Candidate] = OrderedDict()
        self._taken: dict[str, Delivery] = {}
        self.dropped: list[Dropped] = []
        """Drops that wait for the next commit."""

    def __len__(self) -> int:
        """Groups that wait for a step."""
        return len(self._held)

    def __contains__(self, group_id: str) -> bool:
        """Whether a copy of this group is already here: waiting, dropped, or on its way to commit."""
        waiting = group_id in self._held or group_id in self._taken
        return waiting or any(drop.group_id == group_id for drop in self.dropped)

    def put(self, candidate: Candidate) -> None:
        """Add a group, or drop it at once when it has no baseline."""
        if sum(reward is not None for reward in candidate.rewards) < MINIMUM_SCORED:
            self._drop(candidate, DropReason.UNSCORABLE)
        else:
            self._held[candidate.group_id] = candidate

    def put_back(self, candidates: list[Candidate]) -> None:
        """Return groups of a step that was rolled back; they are the oldest again."""
        for candidate in reversed(candidates):
            self._taken.pop(candidate.group_id, None)
            self._held[candidate.group_id] = candidate
            self._held.move_to_end(candidate.group_id, last=False)

    def ready(self, count: int, clock: VectorClock, version: float) -> bool:
        """Whether ``take`` would return ``count`` groups now. Drops what is too old on the way."""
        self._drop_stale(version)
        return sum(candidate.group.clock <= clock for candidate in self._held.values()) >= count

    def take(self, count: int, clock: VectorClock, version: float) -> list[Candidate]:
        """The ``count`` oldest groups that ``clock`` contains, in an order that arrival does not change.

        A group ahead of ``clock`` is held until the learner has merged what it has seen.
        """
        self._drop_stale(version)
        usable = [candidate for candidate in self._held.values() if candidate.group.clock <= clock]
        usable.sort(key=lambda candidate: candidate.version)
        taken = usable[:count]
        for candidate in taken:
            del self._held[candidate.group_id]
            self._taken[candidate.group_id] = candidate.delivery
        return sorted(taken, key=lambda candidate: natural(candidate.group_id))

    def ahead_of(self, clock: VectorClock) -> bool:
        """Whether a held group has seen an update that ``clock`` lacks."""
        return any(not candidate.group.clock <= clock for candidate in self._held.values())

    def drop(self, group_id: str, reason: DropReason) -> None:
        """Drop one held group for a reason found outside."""
        self._drop(self._held.pop(group_id), reason)

    def take_dropped(self) -> list[Dropped]:
        """All drops that wait for a commit."""
        dropped, self.dropped = self.dropped, []
        self._taken |= {drop.group_id: drop.delivery for drop in dropped}
        return dropped

    def forget(self, group_ids: Iterable[str]) -> None:
        """These groups are committed: they no longer need to be kept alive."""
        for group_id in group_ids:
            self._taken.pop(group_id, None)

    def deliveries(self) -> list[Delivery]:
        """Every unacknowledged delivery: all of them must be kept alive."""
        held = [candidate.delivery for candidate in self._held.values()]
        return [*held, *(drop.delivery for drop in self.dropped), *self._taken.values()]

    def _drop_stale(self, version: float) -> None:
        for candidate in list(self._held.values()):
            if version - candidate.version > self._max_staleness:
                self.drop(candidate.group_id, DropReason.STALE)

    def _drop(self, candidate: Candidate, reason: DropReason) -> None:
        self.dropped.append(Dropped(candidate.group_id, reason, candidate.delivery))


def natural(group_id: str) -> tuple[str, int]:
    """Sort key of a group id ``<learner>.<number>``: by learner, then by number."""
    learner, _, number = group_id.rpartition(".")
    return (learner, int(number)) if number.isdigit() else (group_id, 0)
