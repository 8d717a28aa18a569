"""The stepper: the heavy half of a learner, run off the event loop.

It owns the trainable policy and the register, and moves both together: a step, every few steps an
update, and back to the last committed point when a commit fails.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import structlog

from protocol.ports import Clock
from roles.learner.batch import Batch
from roles.learner.policy import Policy, State, StepResult, at_hand
from roles.learner.register import Published, Register
from roles.policy.compose import Factors, whole_updates
from roles.policy.norm_bound import Step, out_of_proportion
from roles.policy.policies import Update

log = structlog.get_logger(__name__)

RESIDUAL = "residual."
"""Prefix of the residual's tensors in a saved state."""
RESIDUAL_COUNT = "residual_count"
"""This learner's update after which the residual was left."""


@dataclass(frozen=True, slots=True)
class SafePoint:
    """Everything a learner returns to when a commit fails: register and optimizer state."""

    register: Register
    optimizer: Future[State]
    """The optimizer's state; perhaps it is still being copied."""

    def state(self) -> State:
        """What a restarted learner goes on from: the optimizer's state, and the register's residual.

        Waits for the copy: call it off the event loop.
        """
        return self.optimizer.result() | _residual_state(self.register)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did. ``published`` is the update to commit, if one is due."""

    result: StepResult
    due: bool
    published: Published | None
    after: SafePoint | None
    """Where the learner stands after a step that is due; what a later failure returns to."""
    seconds: float
    publish_s: float = 0.0
    """Part of ``seconds`` in which the update and the point to return to were made."""


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
        self._settled = policy.state()
        """The optimizer's state when unpublished progress was last none."""

    def safe_point(self) -> SafePoint:
        """A copy of where this learner stands."""
        return SafePoint(self.register.copy(), self._policy.state())

    def step(self, batch: Batch, weight: float, publish_every: int = 1) -> StepOutcome:
        """One optimizer step; makes an update of ``weight`` when ``publish_every`` steps are done."""
        started = self._clock.monotonic()
        # By the policy's version, so that a learner that joins late uses the rate of its peers.
        result = self._policy.step(batch.samples, whole_updates(self.register.version))
        self._changed |= result.updated
        self._steps_since += 1
        due = self._steps_since >= publish_every
        published = after = None
        trained = self._clock.monotonic()
        if due:
            if self._changed:
                published, result = self._publish(result, weight)
            self._steps_since, self._changed = 0, False
            after = self.safe_point()
            self._settled = after.optimizer
        ended = self._clock.monotonic()
        return StepOutcome(result, due, published, after, ended - started, ended - trained)

    def merge(self, learner: str, update: Update) -> None:
        """Take in a peer's newer update; unpublished progress and moments are kept."""
        manifest = update.manifest
        factors = self.register.merge(
            learner,
            update.factors,
            manifest.count,
            manifest.weight,
            self._policy.current(),
            Step.of(manifest),
        )
        self._policy.load(factors)

    def restore(self, point: SafePoint) -> None:
        """Return to a safe point; what was trained since is gone."""
        self.register = point.register.copy()
        self._settled = point.optimizer
        self._go_back()
        self._steps_since, self._changed = 0, False

    def load_state(self, state: State) -> None:
        """Set the optimizer's state, and the residual that was saved with it."""
        if residual := residual_in(state, self.register.count):
            self.register.residual = residual
        self._settled = at_hand(_optimizer_state(state))
        self._policy.restore(self._settled.result())

    def _publish(self, result: StepResult, weight: float) -> tuple[Published | None, StepResult]:
        """The next update, unless it would be out of proportion: then all that was trained since the last
        one is gone, as after a step that was not finite."""
        tried = self.register.copy()
        published = tried.publish(self._policy.current(), weight)
        metrics = result.metrics | {"step/norm": published.step_norm}
        if why := out_of_proportion(published.step, tried.peers_steps, tried.settings):
            log.warning("step_out_of_proportion", reason=why, clock=self.register.clock.text)
            self._go_back()
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            skipped = finite | {"step/skipped_out_of_proportion_total": 1.0}
            return None, StepResult(updated=False, metrics=skipped)
        self.register = tried
        self._policy.load(published.policy)
        return published, StepResult(updated=result.updated, metrics=metrics)

    def _go_back(self) -> None:
        """To the register's policy, without any unpublished progress."""
        self._policy.load(self.register.base)
        self._policy.restore(self._settled.result())


def residual_in(state: State, count: int) -> Factors:
    """The residual that was saved with an optimizer's state at this learner's update ``count``, if any."""
    if RESIDUAL_COUNT not in state or int(state[RESIDUAL_COUNT][0]) != count:
        return {}  # an older one was published since
    return {
        name.removeprefix(RESIDUAL): tensor for name, tensor in state.items() if name.startswith(RESIDUAL)
    }


def _residual_state(register: Register) -> State:
    """The register's residual, as entries of a saved state."""
    if not register.residual:
        return {}
    entries: State = {f"{RESIDUAL}{name}": tensor for name, tensor in register.residual.items()}
    return entries | {RESIDUAL_COUNT: np.array([register.count], np.int64)}


def _optimizer_state(state: State) -> State:
    """A saved state without the register's residual."""
    return {name: t for name, t in state.items() if not name.startswith((RESIDUAL, RESIDUAL_COUNT))}
