"""The engine port: what a sampler asks of whatever generates tokens.

An engine batches concurrent ``sample`` calls by itself. Rollouts finish under the policy they started
with, whatever is loaded meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from protocol.arrays import IntArray
from protocol.messages import Rollout, SamplingParams
from roles.policy.compose import Factors


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """``count`` completions of one prompt. ``policy`` None means the newest when sampling starts."""

    prompt_token_ids: IntArray
    count: int
    params: SamplingParams
    seed: int
    policy: str | None
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of a request: completions that finished before the deadline, in order of index."""

    policy: str
    rollouts: tuple[Rollout, ...]
    generation_s: float
    first_token_s: float | None = field(default=None, compare=False)
    """From the start to the first token of any rollout; None if the engine cannot tell."""
    held_s: float | None = field(default=None, compare=False)
    """Part of ``generation_s`` in which rows waited and the engine decoded nothing; None likewise."""


class Engine(Protocol):
    """One base model with several policies resident."""

    @property
    def name(self) -> str:
        """Engine and version, for provenance: ``transformers-5.24.0-cpu-float32``."""
        ...

    @property
    def groups_max(self) -> int:
        """How many requests of one rollout the engine can decode together."""
        ...

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Make a policy available. Raises EngineError unless every tensor found its module.

        A name is bound to its weights for ever; loading it again is no work.
        """
        ...

    async def unload_policy(self, name: str) -> None:
        """Forget a policy once its last running rollout has finished."""
        ...

    async def sample(self, request: SampleRequest) -> Sampled:
        """Generate. Raises EngineError if the policy is unknown or the prompt does not fit."""
        ...

    async def abandon(self, policy: str) -> None:
        """Fail, with EngineError, the requests that took ``policy`` as the newest and still run.

        Their rollouts would be too old for anybody. Requests that asked for it by name go on.
        """
        ...

    async def conclude(self) -> None:
        """End every request that is not whole: it fails, or resolves with what is finished.

        Either way its task goes back to the queue: of a group that ends early, which rollouts are there is
        no accident.
        """
        ...

    async def close(self) -> None:
        """Stop generating and free the device."""
        ...
