"""The norm bound: an update whose step is out of proportion to its peers' is refused by everyone (pure).

The verdict follows from what the manifests of the update's clock record, so that all come to the same one:

    norm(step) <= step_norm_max * median over the other learners in the update's clock of norm(their step)

A step's norm is ``||update_i[n] - update_i[n-1]||_2 / weight of this step`` over all factors. A peer that
last published in an earlier part of the learning rate's warm-up is scaled up to the author's part of it, or
learners that left early would hold the others to their small steps for ever. Where one of these manifests
is not kept any more, nothing is refused: an honest author has judged its step itself before it published.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.learner_spec import LearnerSpec
from protocol.manifest import Manifest
from roles.policy.chains import PREVIOUS
from roles.policy.compose import Factors, whole_updates

LIE = 0.01
"""Relative difference beyond which a recorded norm is not the update's own."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a manifest records of an update's step."""

    norm: float
    """At weight 1; 0 if nothing moved, or if nothing is recorded."""
    version: float
    """Of the policy that the update made."""

    @classmethod
    def of(cls, manifest: Manifest) -> Step:
        """As its author recorded it."""
        return cls(manifest.step_norm, manifest.version)


UNRECORDED = Step(0.0, 0.0)


def step_norm(update: Factors, before: Factors | None, weight: float) -> float:
    """Norm at weight 1 of the step from ``before`` (None: from nothing) to ``update``; not finite if a
    number is not, or if ``weight`` is not positive."""
    with np.errstate(over="ignore", invalid="ignore"):
        steps = (tensor if before is None else tensor - before[name] for name, tensor in update.items())
        return norm_at_one(map(squared, steps), weight)


def squared(step: NDArray[Any]) -> float:
    """The squared norm of one factor's step, to fp32 precision; infinite from 1e38 on."""
    flat = step.ravel()
    return float(flat @ flat)


def norm_at_one(squares: Iterable[float], weight: float) -> float:
    """The norm at weight 1 of a step from the squared norms of its factors, as ``step_norm`` gives it."""
    total = sum(squares)
    return math.sqrt(total) / weight if weight > 0 and math.isfinite(total) else math.inf


def out_of_proportion(step: Step, peers: Iterable[Step], settings: LearnerSpec) -> str | None:
    """Why an update is refused whose clock holds these steps of other learners, or None if it is not."""
    if not math.isfinite(step.norm):
        return "the step is not finite"
    norms = [peer.norm * _warmer(step, peer, settings) for peer in peers if peer.norm > 0]
    if not (norms and settings.step_norm_max):
        return None
    usual = median(norms)
    if step.norm <= settings.step_norm_max * usual:
        return None
    return (
        f"a step of norm {step.norm:.4g} at weight 1 is more than {settings.step_norm_max:g} times "
        f"{usual:.4g}, the median of its peers"
    )


def lie(manifest: Manifest, update: Factors, before: tuple[Manifest, Factors] | None) -> str | None:
    """Why a manifest is refused that records another norm than its update's step has, or None.

    ``before`` is the author's previous update, if it is at hand: without it nobody can tell, but for the
    first update, which has none.
    """
    if manifest.count == 1:
        actual = step_norm(update, None, manifest.weight)
    elif before is not None and before[0].path == manifest.extra.get(PREVIOUS):
        actual = step_norm(update, before[1], manifest.weight - before[0].weight)
    else:
        return None
    if math.isclose(manifest.step_norm, actual, rel_tol=LIE):
        return None
    return f"its step has norm {actual:.4g} at weight 1, not {manifest.step_norm:.4g} as its manifest says"


def _warmer(step: Step, peer: Step, settings: LearnerSpec) -> float:
    """How much further the warm-up had come at ``step``; at least 1."""
    return max(1.0, _warmth(step, settings) / _warmth(peer, settings))


def _warmth(step: Step, settings: LearnerSpec) -> float:
    """Share of the full learning rate that the warm-up allowed."""
    return min(1.0, (whole_updates(step.version) + 1) / max(1, settings.warmup_updates))
