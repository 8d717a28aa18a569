"""Where the turns of a completion begin and end, as its loss mask tells (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of one origin: a turn of the policy, or what stands between two of them."""

    begin: int
    end: int
    sampled: bool

    def __len__(self) -> int:
        """Tokens."""
        return self.end - self.begin

    @property
    def tokens(self) -> slice:
        """Where they stand."""
        return slice(self.begin, self.end)


def spans_of(sampled: NDArray[np.bool_]) -> list[Span]:
    """The spans of a completion in order; ``sampled`` has shape [T].

    Example: ``[1, 1, 0, 0, 0, 1]`` has spans 0-2 (sampled), 2-5 and 5-6 (sampled).
    """
    edges = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(sampled)]
    return [Span(a, b, bool(sampled[a])) for a, b in pairwise(edges) if a < b]


def turn_lengths(sampled: NDArray[np.bool_]) -> Sequence[int]:
    """Tokens of each of the policy's turns."""
    return [len(span) for span in spans_of(sampled) if span.sampled]
