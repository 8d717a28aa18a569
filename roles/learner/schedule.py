"""The learning rate of each update: a pure function, so that a restart cannot repeat the warm-up."""

from __future__ import annotations

import math

from protocol.learner_spec import LearnerSpec


def learning_rate(spec: LearnerSpec, update: int) -> float:
    """Learning rate of update number ``update`` (from 0).

    The warm-up is linear and its first update already moves (``1 / warmup_updates``); afterwards the
    rate stays, or falls to zero at ``spec.updates`` in a line or half a cosine.
    """
    if update < spec.warmup_updates:
        return spec.learning_rate * (update + 1) / spec.warmup_updates
    if spec.schedule == "constant":
        return spec.learning_rate
    span = max(1, spec.updates - spec.warmup_updates)
    progress = min(1.0, (update - spec.warmup_updates) / span)
    remaining = 1.0 - progress if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.learning_rate * remaining
