"""What telemetry tells of one step, under the field's own names (pure)."""

from __future__ import annotations

from roles.learner.batch import Batch
from roles.learner.stepper import StepOutcome


def step_fields(batch: Batch, outcome: StepOutcome) -> dict[str, float]:
    """The batch's and the step's own metrics, and the seconds it took."""
    times = {"updated": outcome.result.updated, "perf/step_s": outcome.seconds}
    return batch.metrics | outcome.result.metrics | times
