"""One learner's tasks: which were issued, and which are not settled (trained, dropped or dead) yet (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Cursor:
    """What the broker keeps of a learner's tasks, as text: ``<next>``, restored ``<next> <beyond>``."""

    next: int
    """The number of the next task."""
    beyond: int | None = None
    """After a restoration from the bucket: how many tasks from ``next`` on were settled all the same. All
    others from there on left the ring with the broker's disk; their learner issues them again."""

    def __str__(self) -> str:
        return str(self.next) if self.beyond is None else f"{self.next} {self.beyond}"

    @classmethod
    def parse(cls, value: bytes) -> Cursor:
        """Read a cursor; what is none counts as restored from nothing."""
        number, _, beyond = value.decode(errors="replace").partition(" ")
        if not number.isdecimal() or (beyond and not beyond.isdecimal()):
            return cls(0, 0)
        return cls(int(number), int(beyond) if beyond else None)

    @property
    def restored(self) -> bool:
        """Whether tasks must be issued again."""
        return self.beyond is not None

    @property
    def issued(self) -> int:
        """Tasks on this learner's account."""
        return self.next + (self.beyond or 0)


def task_of(group_id: str) -> tuple[str, int] | None:
    """Learner and number of the task behind a group ``<learner>.<number>``; None for any other text."""
    learner, _, number = group_id.rpartition(".")
    return (learner, int(number)) if number.isdecimal() else None


class Outstanding:
    """Numbers of a learner's own tasks. Everything below ``floor`` is settled, nothing from ``cursor`` on."""

    def __init__(self, floor: int = 0, cursor: int = 0) -> None:
        """``cursor`` tasks were issued; those from ``floor`` on may be on their way."""
        self.cursor = max(floor, cursor)
        self._floor = floor
        self._settled: set[int] = set()

    @property
    def floor(self) -> int:
        """The lowest number that is not settled."""
        return self._floor

    def issued(self, count: int) -> None:
        """So many more tasks were issued."""
        self.cursor += count
        self._advance()

    def settle(self, numbers: Iterable[int]) -> None:
        """These tasks were trained, dropped or buried, by whomever: also one that is still being issued."""
        self._settled |= {number for number in numbers if self._floor <= number}
        self._advance()

    def oldest(self, count: int) -> list[int]:
        """The lowest numbers that are not settled, at most ``count``."""
        return list(islice((n for n in range(self._floor, self.cursor) if n not in self._settled), count))

    def all(self) -> list[int]:
        """Every number that is not settled."""
        return self.oldest(self.cursor - self._floor)

    def _advance(self) -> None:
        while self._floor in self._settled and self._floor < self.cursor:
            self._settled.remove(self._floor)
            self._floor += 1
