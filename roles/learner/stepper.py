"""The stepper: the heavy half of a learner, run off the event loop.

It owns the trainable policy and the register, and moves both together: a step, every few steps an
update, and back to the last committed point when a commit fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ports import Clock
from roles.learner.batch import Batch
from roles.learner.policy import Policy, State, StepResult
from roles.learner.register import Published, Register
from roles.policy.policies import Update


@dataclass(frozen=True, slots=True)
class SafePoint:
    """Everything a learner returns to when a commit fails: register and optimizer state."""

    register: Register
    state: State


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did. ``published`` is the update to commit, if one is due."""

    result: StepResult
    due: bool
    published: Published | None
    after: SafePoint | None
    """Where the learner stands after a step that is due; what a later failure returns to."""
    seconds: float


class Stepper:
    """Policy and register of one learner. Every method is synchronous and heavy."""

    def __init__(self, policy: Policy, register: Register, clock: Clock) -> None:
        """``policy`` is moved to where ``register`` stands; ``clock`` measures steps."""
        self._policy = policy
        self._clock = clock
        self._steps_since = 0
        self._changed = False
        self.register = register
        policy.load(register.base)

    def safe_point(self) -> SafePoint:
        """A copy of where this learner stands."""
        return SafePoint(self.register.copy(), self._policy.state())

    def step(self, batch: Batch, weight: float, publish_every: int = 1) -> StepOutcome:
        """One optimizer step; makes an update of ``weight`` when ``publish_every`` steps are done."""
        started = self._clock.monotonic()
        result = self._policy.step(batch.samples, self.register.count)
        self._changed |= result.updated
        self._steps_since += 1
        due = self._steps_since >= publish_every
        published = after = None
        if due:
            if self._changed:
                published = self.register.publish(self._policy.factors(), weight)
                self._policy.load(published.policy)
            self._steps_since, self._changed = 0, False
            after = self.safe_point()
        return StepOutcome(result, due, published, after, self._clock.monotonic() - started)

    def merge(self, learner: str, update: Update) -> None:
        """Take in a peer's newer update; unpublished progress and moments are kept."""
        manifest = update.manifest
        factors = self.register.merge(
            learner, update.factors, manifest.count, manifest.weight, self._policy.factors()
        )
        self._policy.load(factors)

    def restore(self, point: SafePoint) -> None:
        """Return to a safe point; what was trained since is gone."""
        self.register = point.register.copy()
        self._policy.load(self.register.base)
        self._policy.restore(point.state)
        self._steps_since, self._changed = 0, False

    def load_state(self, state: State) -> None:
        """Set the optimizer's state alone."""
        self._policy.restore(state)
