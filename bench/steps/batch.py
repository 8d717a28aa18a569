"""The batch that all arms of ``bench.learner`` train on: what it is, and the file that it lies in.

Shape legend: R rows (rollouts), P prompt tokens, C tokens of the longest completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

FACTOR = "factor/"
RANK, ALPHA = 8, 16.0
CLIP = 0.2
TRAINED_RATE = 1e-12
"""So small that the factors stay: every step of a measurement is the same step."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A batch in numbers: groups of rows that share their prompt."""

    groups: int
    rows: int
    """Rows of a group."""
    prompt_tokens: int
    completion_tokens: tuple[int, int]
    """Shortest and longest; lengths are uniform in between."""
    equal_rewards: int = 0
    """So many of the groups have no spread of rewards; the others' rewards are then 0 or 1."""


CASES = {
    "mixed": Case(2, 8, 128, (32, 256)),
    "long_prompt": Case(2, 8, 1024, (64, 64)),
    "binary": Case(2, 8, 128, (32, 256), equal_rewards=1),
    "quick": Case(2, 8, 8, (3, 12)),
    "quick_binary": Case(2, 8, 8, (3, 12), equal_rewards=1),
}


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's rollouts, and the adapter before it."""

    prompts: Array
    """Shape [R, P], int64."""
    completions: Array
    """Shape [R, C], int64; zero after the end."""
    lengths: Array
    """Tokens of each completion, shape [R]."""
    logprobs: Array
    """The sampler's, shape [R, C], fp32; zero after the end."""
    advantages: Array
    """Shape [R], fp32."""
    factors: dict[str, Array]
    """LoRA factors by PEFT tensor name."""

    @property
    def mask(self) -> Array:
        """True where a completion token is, shape [R, C]."""
        return np.asarray(np.arange(self.completions.shape[1]) < self.lengths[:, None])

    @property
    def trained_tokens(self) -> int:
        """Completion tokens of all rows."""
        return int(self.lengths.sum())

    def save(self, file: Path) -> None:
        """Write everything as safetensors."""
        tensors = {name: getattr(self, name) for name in self.__slots__ if name != "factors"}
        save_file(tensors | {FACTOR + name: value for name, value in self.factors.items()}, file)

    @classmethod
    def load(cls, file: Path) -> StepBatch:
        """Read what ``save`` wrote."""
        tensors = load_file(file)
        factors = {
            name.removeprefix(FACTOR): tensors.pop(name) for name in list(tensors) if name.startswith(FACTOR)
        }
        return cls(**tensors, factors=factors)


def draw(case: Case, vocabulary: int, seed: int = 0) -> StepBatch:
    """Random tokens and rewards; ``logprobs`` are zero and ``factors`` empty until a model has seen them."""
    rng = np.random.default_rng(seed)
    shortest, longest = case.completion_tokens
    lengths = rng.integers(shortest, longest + 1, case.groups * case.rows)
    prompts = rng.integers(3, vocabulary, (case.groups, case.prompt_tokens))
    completions = rng.integers(3, vocabulary, (lengths.size, int(lengths.max())))
    rewards = rng.normal(size=(case.groups, case.rows))
    if case.equal_rewards:
        rewards = (np.arange(case.rows) % 3 == 0) * np.ones((case.groups, 1))
        rewards[: case.equal_rewards] = 1.0
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    present = np.arange(completions.shape[1]) < lengths[:, None]
    return StepBatch(
        prompts=np.repeat(prompts, case.rows, axis=0),
        completions=np.where(present, completions, 0),
        lengths=lengths,
        logprobs=np.zeros(completions.shape, np.float32),
        advantages=advantages.ravel().astype(np.float32),
        factors={},
    )


def draw_factors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Array]:
    """An adapter that has learned a little: A as at genesis, B small but not zero."""
    rng = np.random.default_rng(seed)
    factors = {}
    for name in sorted(shapes):
        width = shapes[name][1] ** -0.5 if ".lora_A." in name else 0.01
        factors[name] = rng.uniform(-width, width, shapes[name]).astype(np.float32)
    return factors
