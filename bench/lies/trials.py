"""Streams of groups drawn from pools, and what a verifier's own choice and tests make of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.audit_spec import AuditSpec
from roles.verifier.audit_stream import Chosen, Evidence, Stream, faults_of

NEVER = 10**6


@dataclass(frozen=True, slots=True)
class Pool:
    """Evidence of one kind of sampler."""

    evidence: Sequence[Evidence]

    @property
    def refused(self) -> float:
        """Share of its groups that are refused by themselves when they are audited."""
        return float(np.mean([bool(faults_of(one)) for one in self.evidence]))

    def drawn(self, rng: np.random.Generator) -> Iterator[Evidence]:
        """Its groups for ever, in a random order: none again before all have been drawn."""
        while True:
            for place in rng.permutation(len(self.evidence)):
                yield self.evidence[place]


@dataclass(frozen=True, slots=True)
class Found:
    """How one trial ended."""

    groups: int
    """Since the sampler began to lie, up to the one that proved it; ``NEVER`` if none did."""
    audited: int
    """Of these groups."""


def found_after(
    pool: Pool, honest: Pool, spec: AuditSpec, rng: np.random.Generator, *, before: int, most: int
) -> Found:
    """One sampler that is honest for ``before`` groups and lies for at most ``most``."""
    stream = Stream("key", Chosen(rng.bytes(16), spec))
    past, lies = honest.drawn(rng), pool.drawn(rng)
    audited = 0
    for number in range(-before, most):
        if not stream.wants():
            continue
        stream.add(next(past if number < 0 else lies))
        audited += number >= 0
        if stream.guilty_of is None:
            continue
        if number >= 0:
            return Found(number + 1, audited)
        stream.begin()  # wrongly judged, and lifted: not what this trial is about
    return Found(NEVER, audited)


def possible(refused: float, spec: AuditSpec, groups: int) -> float:
    """The share of liars that any test could find within ``groups``: those of which an audit met what shows.

    Where the task's seed ties every token, a group that shows nothing is token for token an honest one, and
    no evidence. ``refused`` is the share of groups that show; about one in ``1 / rate`` is audited.
    """
    missed: float = (1 - refused) ** (spec.rate * groups)
    return 1 - missed


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate of which ``hits`` in ``trials`` were seen (Wilson 1927)."""
    rate, noise = hits / trials, z * z / trials
    middle = (rate + noise / 2) / (1 + noise)
    half = math.sqrt(rate * (1 - rate) * noise + noise * noise / 4) / (1 + noise)
    return max(0.0, middle - half), min(1.0, middle + half)
