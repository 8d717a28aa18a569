"""What telemetry tells of one step, under the field's own names (pure); docs/METRICS.md lists them."""

from __future__ import annotations

from roles.learner.batch import Batch
from roles.learner.stepper import StepOutcome


def step_fields(batch: Batch, outcome: StepOutcome, wait_s: float, blocked_s: float) -> dict[str, float]:
    """The batch's and the step's own metrics, and where the time went.

    ``wait_s`` passed before the step for want of groups, ``blocked_s`` after it for want of a place among the
    steps that wait to be committed.
    """
    metrics = batch.metrics | outcome.result.metrics
    times = {
        "updated": outcome.result.updated,
        "perf/rollout_wait_s": wait_s,
        "perf/step_s": outcome.seconds,
        "perf/publish_s": outcome.publish_s,
        "perf/publish_blocked_s": blocked_s,
    }
    return metrics | times | _by_wall_clock(metrics, wait_s + outcome.seconds + blocked_s)


def _by_wall_clock(metrics: dict[str, float], seconds: float) -> dict[str, float]:
    """Speeds over all the time that passed, waiting included."""
    if seconds <= 0:
        return {}
    found = {
        f"perf/{kind}_tok_s_wall_clock": metrics[count] / seconds
        for kind in ("forwarded", "trained")
        if (count := f"batch/{kind}_tokens_per_step") in metrics
    }
    if "perf/mfu_fwd_bwd" in metrics:
        found["perf/mfu_wall_clock"] = metrics["perf/mfu_fwd_bwd"] * metrics["perf/fwd_bwd_s"] / seconds
    return found
