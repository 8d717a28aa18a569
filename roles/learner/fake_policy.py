"""A policy without a model, for simulations and tests: same checks, same rules, made-up gradients.

The gradient is a sum over samples of the advantage times a direction that the tokens alone decide, so
that equal steps give equal factors on every machine; momentum is the optimizer's state. It validates
its input as a real policy must, and refuses what would silently train on nonsense.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from roles.learner.policy import Sample, State, StepResult, at_hand, uneven
from roles.policy.compose import Factors, fault

MOMENTUM = 0.9
LOGPROB_ROUNDING = 1e-5
SHAPES = {"layer.lora_A.weight": (2, 8), "layer.lora_B.weight": (8, 2)}
"""Tensors of the made-up adapter."""


class FakePolicy:
    """Implements ``Policy``. ``updates_seen`` has the ``update`` argument of each step, in order."""

    def __init__(self, learning_rate: float = 0.01) -> None:
        self._learning_rate = learning_rate
        self._factors: Factors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self._momentum: Factors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self._steps = 0
        self.updates_seen: list[int] = []

    def genesis(self, seed: int) -> Factors:
        """A random, B zero."""
        generator = np.random.default_rng(seed)
        return {
            name: generator.normal(size=shape).astype(np.float32)
            if ".lora_A." in name
            else np.zeros(shape, np.float32)
            for name, shape in SHAPES.items()
        }

    def load(self, factors: Factors) -> None:
        """Set the factors; momentum is kept. Raises ValueError on factors of another adapter."""
        if why := fault(factors, self._factors):
            raise ValueError(why)
        self._factors = {name: tensor.copy() for name, tensor in factors.items()}

    def factors(self) -> Factors:
        """A copy of the current factors."""
        return {name: tensor.copy() for name, tensor in self._factors.items()}

    def current(self) -> Factors:
        """The factors themselves: the next step changes them."""
        return self._factors

    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        """One step; no update when every advantage is zero. Raises ValueError on a malformed sample."""
        if not samples:
            raise ValueError("a step needs samples")
        for sample in samples:
            _check(sample)
        self.updates_seen.append(update)
        taught = [sample for sample in samples if sample.advantage]
        if not taught:
            return StepResult(updated=False, metrics={"grad_norm": 0.0})
        norm = 0.0
        for name, momentum in self._momentum.items():
            gradient = np.zeros_like(momentum)
            for sample in taught:
                gradient += np.float32(sample.advantage / len(samples)) * _direction(sample, name)
            momentum *= np.float32(MOMENTUM)
            momentum += gradient
            self._factors[name] += np.float32(self._learning_rate) * momentum
            norm += float((gradient**2).sum())
        self._steps += 1
        return StepResult(updated=True, metrics={"grad_norm": norm**0.5})

    def state(self) -> Future[State]:
        """Momentum and step count."""
        momentum = {f"momentum.{name}": tensor.copy() for name, tensor in self._momentum.items()}
        return at_hand({**momentum, "steps": np.array([self._steps], np.int64)})

    def restore(self, state: State) -> None:
        """Return to a saved state. Raises KeyError if it is another policy's."""
        self._momentum = {name: np.array(state[f"momentum.{name}"], np.float32) for name in self._momentum}
        self._steps = int(state["steps"][0])


def _check(sample: Sample) -> None:
    if not len(sample.prompt_token_ids):
        raise ValueError("a sample without a prompt")
    if reason := uneven(sample):
        raise ValueError(reason)
    if not sample.trained_tokens:
        raise ValueError("a sample without a token to train on")
    if not np.isfinite(sample.sampler_logprobs).all() or sample.sampler_logprobs.max() > LOGPROB_ROUNDING:
        raise ValueError("log-probabilities are finite and at most 0")
    if not np.isfinite(sample.advantage) or not sample.temperature > 0:
        raise ValueError(f"advantage {sample.advantage} at temperature {sample.temperature}")


def _direction(sample: Sample, name: str) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Where this completion pulls a tensor; entries of unit variance."""
    seed = [zlib.crc32(sample.prompt_token_ids.tobytes()), zlib.crc32(sample.token_ids.tobytes())]
    generator = np.random.default_rng([*seed, zlib.crc32(name.encode())])
    return generator.normal(size=SHAPES[name]).astype(np.float32)
