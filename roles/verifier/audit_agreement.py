"""Do the log-probabilities that a sampler reports agree with those recomputed under the policy it claims?

Two honest engines differ by rounding: by 1e-6 in fp32, by 1e-2 in bf16, more where a token is improbable.
So a group is flagged by statistics over its tokens, each against a tolerance that was measured for the pair
of engines (``grpo-node calibrate``), and a stream of flags is judged by their rate (``audit_process.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from protocol.arrays import FloatArray
from protocol.audit_spec import ToleranceSpec
from roles.verifier.audit_facts import Numbers, TokenFacts

STATISTICS = ("median", "p90", "largest", "bias", "seed")


def differences(claimed: Sequence[FloatArray], facts: Sequence[TokenFacts]) -> dict[str, float]:
    """Statistics of d = claimed - recomputed log-probability over all tokens of a group.

    ``median``, ``p90`` and ``largest`` of |d|; ``bias`` is the mean of d: the log of the geometric mean of
    the ratio between what is claimed and what is so, without sign.
    """
    d = np.concatenate([c.astype(np.float64) - f.logprobs for c, f in zip(claimed, facts, strict=True)])
    size = np.abs(d)
    median, p90 = np.quantile(size, [0.5, 0.9])
    return {
        "median": float(median),
        "p90": float(p90),
        "largest": float(size.max()),
        "bias": float(abs(d.mean())),
    }


def seed_distance(uniforms: Sequence[Numbers], facts: Sequence[TokenFacts]) -> float:
    """How far the furthest token is from the one that the task's seed gives.

    The engines here draw by inverse CDF with a uniform number that follows from seed, rollout and position,
    so an honest token's part [below, below + p) of [0, 1) holds its number, up to rounding. Who samples
    otherwise, chooses among several samples, or edits one, misses it. Shape of each: [T] at least.
    """
    furthest = 0.0
    for uniform, one in zip(uniforms, facts, strict=True):
        u = uniform[: len(one)]
        above = u - (one.below + np.exp(one.logprobs))
        furthest = max(furthest, float(np.maximum(one.below - u, above).max(initial=0.0)))
    return furthest


def exceeded(statistics: Mapping[str, float], tolerance: ToleranceSpec) -> tuple[str, ...]:
    """Names of the statistics beyond their tolerance; one that is not finite is."""
    limits = {name: getattr(tolerance, name) for name in STATISTICS}
    return tuple(
        name for name, value in statistics.items() if limits[name] is not None and not value <= limits[name]
    )


def tolerance_of(engine: str, tolerances: Mapping[str, ToleranceSpec]) -> ToleranceSpec | None:
    """The tolerance of a sampler's engine: that of the longest pattern it fits; None if it fits none."""
    fits = [pattern for pattern in tolerances if fnmatchcase(engine, pattern)]
    return tolerances[max(fits, key=len)] if fits else None
