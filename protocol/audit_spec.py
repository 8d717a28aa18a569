"""The ``[audit]`` table of a run: how often and how strictly verifiers recompute what samplers claim."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from protocol.spec import Count, CountOrZero, NonNegative, Positive, Spec


class ToleranceSpec(Spec):
    """How far a sampler's log-probabilities may be from recomputed ones, for one pair of engines.

    Statistics over the tokens of a group; ``grpo-node calibrate`` measures and prints such a table.
    """

    median: Positive = 0.02
    """Of |claimed - recomputed|, in nats."""
    p90: Positive = 0.1
    """Its 90th percentile."""
    largest: Positive = 1.5
    bias: Positive = 0.02
    """|mean of claimed - recomputed|: the log of the mean ratio."""
    seed: Positive | None = None
    """Distance of a token from the one that the task's seed gives, in probability mass; absent for engines
    that draw otherwise. Greater than the mass that rounding moves."""
    flag_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Bound on the share of honest groups beyond one of these."""


class AuditSpec(Spec):
    """Whether verifiers recompute what samplers claim (docs/audit.md)."""

    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of each sampler's groups that are audited, by a choice it cannot foresee. 0: no audits, no
    quarantine, and verifiers need no model."""
    first: CountOrZero = 4
    """A sampler's first groups, all audited."""
    tokens_max: Count = 16384
    """Tokens of one audit, prompts included; of a larger group some rollouts are audited."""
    false_quarantines: Annotated[float, Field(gt=0, lt=0.5)] = 2.5e-4
    """Bound on the chance that an honest sampler is ever found guilty by one verifier."""
    grace_s: NonNegative = 30.0
    """How long a sampler that was told of its malfunction may still send what it had begun."""
    tolerances: Annotated[dict[str, ToleranceSpec], Field(min_length=1)] = {"*": ToleranceSpec()}
    """By pattern of the sampler's engine; the longest that fits counts, and what fits none is refused."""
