"""Vector clocks: which updates of which learners a policy contains.

A clock maps learner ids to counts of updates. Absent means zero, so genesis is the empty clock.
Clocks form a join-semilattice under the per-learner maximum (Shapiro et al. 2011, state-based
CRDTs); that is what lets peers merge policies in any order and end with the same one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from protocol.limits import COUNT_MAX, LEARNERS_MAX, NAME_MAX

NAME_PATTERN = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{NAME_MAX - 1}}}")


@dataclass(frozen=True, slots=True)
class VectorClock:
    """An immutable clock; ``counts`` is sorted by learner id and holds no zeros.

    Example: ``VectorClock.of({"a": 2}).join(VectorClock.of({"b": 1}))`` has text ``a:2,b:1``.
    """

    counts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> VectorClock:
        """Build a clock; raises ValueError on a bad learner id or count."""
        if len(counts) > LEARNERS_MAX:
            raise ValueError(f"a clock names at most {LEARNERS_MAX} learners, got {len(counts)}")
        for learner, count in counts.items():
            if not NAME_PATTERN.fullmatch(learner):
                raise ValueError(f"not a learner id: {learner!r}")
            if type(count) is not int or not 0 <= count <= COUNT_MAX:
                raise ValueError(f"not a count of updates of {learner}: {count!r}")
        return cls(tuple(sorted((k, v) for k, v in counts.items() if v)))

    def __getitem__(self, learner: str) -> int:
        """The number of updates of ``learner`` in this clock."""
        return dict(self.counts).get(learner, 0)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Pairs ``(learner, count)`` in sorted order."""
        return iter(self.counts)

    def join(self, other: VectorClock) -> VectorClock:
        """The least clock that contains both: per-learner maximum."""
        merged = dict(self.counts)
        for learner, count in other.counts:
            merged[learner] = max(count, merged.get(learner, 0))
        return VectorClock(tuple(sorted(merged.items())))

    def __le__(self, other: VectorClock) -> bool:
        """True when every update in this clock is also in ``other`` (a partial order)."""
        theirs = dict(other.counts)
        return all(count <= theirs.get(learner, 0) for learner, count in self.counts)

    def __lt__(self, other: VectorClock) -> bool:
        """Strictly before."""
        return self != other and self <= other

    def concurrent(self, other: VectorClock) -> bool:
        """True when neither contains the other."""
        return not self <= other and not other <= self

    @property
    def text(self) -> str:
        """Canonical text, the same for equal clocks; ``genesis`` for the empty one."""
        return ",".join(f"{learner}:{count}" for learner, count in self.counts) or "genesis"

    @property
    def digest(self) -> str:
        """First 16 hex digits of the sha256 of the canonical text; names policies and paths."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """The canonical text."""
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """On the wire a clock is a JSON object ``{learner: count}``."""

        def parse(value: object) -> VectorClock:
            if isinstance(value, VectorClock):
                return value
            if not isinstance(value, dict):
                raise ValueError("a clock is an object {learner: count}")  # noqa: TRY004 pydantic wants ValueError
            return cls.of(value)

        return core_schema.no_info_plain_validator_function(
            parse,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda c: dict(c.counts)),
        )


GENESIS = VectorClock()
