"""The buffer: verified groups that wait for a step; takes the oldest first, drops whole groups (pure)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.clock import VectorClock
from protocol.messages import RolloutGroup, Task, VerifiedGroup
from protocol.reasons import DropReason
from roles.learner.lease import Lease
from roles.learner.outstanding import task_of
from roles.policy.compose import VERSION_ROUNDING

MINIMUM_SCORED = 2
"""A baseline needs two scored rollouts."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A verified group in this learner's hands, unacknowledged until it is committed."""

    task: Task
    group: RolloutGroup
    verified: VerifiedGroup
    lease: Lease
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
    lease: Lease


class Buffer:
    """Groups by id, in order of arrival."""

    def __init__(self, max_staleness: float, *, causal: bool = True) -> None:
        """``max_staleness`` counts versions; a group exactly that old is still used. Unless ``causal``, a
        group need not be contained in the learner's clock."""
        self._max_staleness = max_staleness
        self._causal = causal
        self._held: OrderedDict[str, Candidate] = OrderedDict()
        self._leases: dict[str, Lease] = {}
        """Of every group in hand: waiting, dropped, or on its way to a commit."""
        self._dropped: list[Dropped] = []

    def __len__(self) -> int:
        """Groups that wait for a step."""
        return len(self._held)

    @property
    def leases(self) -> dict[str, Lease]:
        """What this learner holds, by group id: all of it must be kept alive until it is committed."""
        return dict(self._leases)

    @property
    def drops_waiting(self) -> int:
        """Drops that wait for a commit."""
        return len(self._dropped)

    def put(self, candidate: Candidate) -> None:
        """Add a group, or drop it at once when it has no baseline."""
        self._leases[candidate.group_id] = candidate.lease
        if sum(reward is not None for reward in candidate.rewards) < MINIMUM_SCORED:
            self._drop(candidate, DropReason.UNSCORABLE)
        else:
            self._held[candidate.group_id] = candidate

    def put_back(self, candidates: Iterable[Candidate], dropped: Iterable[Dropped]) -> None:
        """Return what was rolled back; its groups are the oldest again, in their order."""
        for candidate in reversed(list(candidates)):
            self._held[candidate.group_id] = candidate
            self._held.move_to_end(candidate.group_id, last=False)
        self._dropped = [*dropped, *self._dropped]

    def ready(self, count: int, clock: VectorClock, version: float) -> bool:
        """Whether ``take`` would return ``count`` groups now. Drops what is too old on the way."""
        self._drop_stale(version)
        return len(self._usable(clock)) >= count

    def take(self, count: int, clock: VectorClock, version: float) -> list[Candidate]:
        """The ``count`` oldest groups that ``clock`` contains, in an order that arrival does not change.

        A group ahead of ``clock`` is held until the learner has merged what it has seen.
        """
        self._drop_stale(version)
        usable = self._usable(clock)
        usable.sort(key=lambda candidate: candidate.version)
        taken = usable[:count]
        for candidate in taken:
            del self._held[candidate.group_id]
        return sorted(taken, key=lambda candidate: natural(candidate.group_id))

    def drop(self, candidate: Candidate, reason: DropReason) -> None:
        """Drop a group for a reason found outside."""
        self._leases[candidate.group_id] = candidate.lease
        self._drop(candidate, reason)

    def take_dropped(self, count_max: int) -> list[Dropped]:
        """The oldest drops that wait for a commit, at most ``count_max``."""
        taken, self._dropped = self._dropped[:count_max], self._dropped[count_max:]
        return taken

    def forget(self, group_ids: Iterable[str]) -> None:
        """These groups are committed: they no longer need to be kept alive."""
        for group_id in group_ids:
            self._leases.pop(group_id, None)

    def _drop_stale(self, version: float) -> None:
        for candidate in list(self._held.values()):
            if version - candidate.version > self._max_staleness + VERSION_ROUNDING:
                self._drop(self._held.pop(candidate.group_id), DropReason.STALE)

    def _usable(self, clock: VectorClock) -> list[Candidate]:
        held = self._held.values()
        return [candidate for candidate in held if not self._causal or candidate.group.clock <= clock]

    def _drop(self, candidate: Candidate, reason: DropReason) -> None:
        self._dropped.append(Dropped(candidate.group_id, reason, candidate.lease))


def natural(group_id: str) -> tuple[str, int]:
    """Sort key of a group id ``<learner>.<number>``: by learner, then by number."""
    return task_of(group_id) or (group_id, 0)
