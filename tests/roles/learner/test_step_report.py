"""What telemetry tells of a step: where the time went, and speeds over all of it."""

from __future__ import annotations

from protocol.runspec import LossSpec
from roles.learner.batch import Batch, make_batch
from roles.learner.fake_policy import FakePolicy
from roles.learner.policy import StepResult
from roles.learner.register import Register
from roles.learner.step_report import step_fields
from roles.learner.stepper import StepOutcome, Stepper
from tests.ground import a_candidate

BATCH = Batch((), {"reward": 0.5}, 0.0)
TRAINED = {
    "batch/forwarded_tokens_per_step": 80.0,
    "batch/trained_tokens_per_step": 20.0,
    "perf/fwd_bwd_s": 2.0,
    "perf/mfu_fwd_bwd": 0.4,
}


def fields(metrics: dict[str, float], seconds: float = 3.0) -> dict[str, float]:
    result = StepResult(updated=bool(metrics), metrics=metrics)
    outcome = StepOutcome(result, due=True, published=None, after=None, seconds=seconds, publish_s=0.5)
    return step_fields(BATCH, outcome, wait_s=4.0, blocked_s=1.0)


def test_the_parts_of_a_steps_time_are_told():
    told = fields(TRAINED)
    assert (told["perf/rollout_wait_s"], told["perf/step_s"]) == (4.0, 3.0)
    assert (told["perf/publish_s"], told["perf/publish_blocked_s"]) == (0.5, 1.0)
    assert (told["reward"], told["updated"]) == (0.5, True)


def test_speeds_by_the_wall_clock_count_waiting():
    told = fields(TRAINED)
    assert told["perf/forwarded_tok_s_wall_clock"] == 10.0
    assert told["perf/trained_tok_s_wall_clock"] == 2.5
    assert told["perf/mfu_wall_clock"] == 0.1


def test_a_step_that_trained_on_nothing_has_no_speed():
    told = fields({})
    assert not [name for name in told if name.endswith("wall_clock")]
    assert told["updated"] is False


class Ticking:
    """A clock on which one second passes at each look."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1.0
        return self._now

    def wall(self) -> float:
        return self.monotonic()

    async def sleep(self, seconds: float) -> None:
        self._now += seconds


def test_making_the_update_is_timed_apart_from_the_step():
    candidate = a_candidate(rewards=(1.0, 0.0))
    batch = make_batch([candidate], LossSpec(), candidate.group.clock, 0.0)
    policy = FakePolicy()
    outcome = Stepper(policy, Register("learner-1", policy.genesis(0)), Ticking()).step(batch, 1.0)
    assert (outcome.seconds, outcome.publish_s) == (2.0, 1.0)
