"""The policy port: what the learner's loop asks of the model it trains.

The loop decides what to train on and when to publish; an implementation (``torch_policy.py``) owns
the base model, the LoRA factors, the optimizer and the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import ByteArray, FloatArray, IntArray
from roles.policy.compose import Factors


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout as the loss sees it."""

    prompt_token_ids: IntArray
    """Shape [P]."""
    token_ids: IntArray
    """Shape [T]; the last one is EOS unless ``truncated``."""
    sampler_logprobs: FloatArray
    """Shape [T]; nothing where ``loss_mask`` is 0."""
    advantage: float
    truncated: bool
    temperature: float
    on_policy: bool = False
    """Sampled under exactly the learner's policy, so that its importance ratio must be 1."""
    loss_mask: ByteArray | None = None
    """1 where the policy sampled the token, 0 where a tool or user spoke, shape [T]; None: all sampled."""

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Which tokens the loss is about, shape [T]; the others are context, like the prompt."""
        if self.loss_mask is None:
            return np.ones(len(self.token_ids), np.bool_)
        chosen: NDArray[np.bool_] = self.loss_mask != 0
        return chosen

    @property
    def trained_tokens(self) -> int:
        """How many those are."""
        return int(self.trained.sum())


def uneven(sample: Sample) -> str | None:
    """Why a sample's arrays are not of one length, or None."""
    tokens, logprobs = len(sample.token_ids), len(sample.sampler_logprobs)
    if tokens != logprobs:
        return f"{tokens} tokens with {logprobs} log-probabilities"
    if sample.loss_mask is not None and len(sample.loss_mask) != tokens:
        return f"{tokens} tokens with a mask of {len(sample.loss_mask)}"
    return None


@dataclass(frozen=True, slots=True)
class StepResult:
    """``metrics`` use the field's names (``ratio``, ``clip_ratio/low_mean``, ``grad_norm``…)."""

    updated: bool
    """False when every token was masked or the gradient was not finite: nothing changed."""
    metrics: dict[str, float]


State = dict[str, NDArray[np.generic]]
"""Optimizer moments, step counts and random state by name; enough to go on exactly."""


def at_hand(state: State) -> Future[State]:
    """A state that nobody has to wait for."""
    future: Future[State] = Future()
    future.set_result(state)
    return future


class Policy(Protocol):
    """A trainable LoRA policy. All methods are synchronous and heavy: call them off the event loop."""

    def genesis(self, seed: int) -> Factors:
        """Fresh factors for ``seed``: A random, B zero."""
        ...

    def load(self, factors: Factors) -> None:
        """Set the factors; the optimizer's moments are kept."""
        ...

    def factors(self) -> Factors:
        """A copy of the current factors, fp32."""
        ...

    def current(self) -> Factors:
        """The factors to read at once: what they say after the next ``step`` or ``load`` is undefined."""
        ...

    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        """One optimizer step over all ``samples``; ``update`` (from 0) sets the learning rate."""
        ...

    def state(self) -> Future[State]:
        """A copy of everything but the factors that the next step depends on, as it is now.

        It may be made while the next step runs.
        """
        ...

    def restore(self, state: State) -> None:
        """Return to a saved state."""
        ...
