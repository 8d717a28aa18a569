"""Builders: each makes one valid thing; keyword arguments override what a test is about."""

from __future__ import annotations

from typing import Any

import numpy as np

from protocol.clock import GENESIS, VectorClock
from protocol.codec import encode
from protocol.identity import Identity
from protocol.manifest import EntryKind, Manifest
from protocol.messages import (
    FinishReason,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Task,
    Verdict,
    VerifiedGroup,
)
from protocol.runspec import RunSpec

RUN = "test"


def an_identity(node: str = "learner-1") -> Identity:
    """A fixed key pair for ``node``."""
    return Identity.deterministic(node)


def a_clock(**counts: int) -> VectorClock:
    """``a_clock(a=2)`` is the clock ``a:2``."""
    return VectorClock.of(counts)


def a_task(**changes: Any) -> Task:
    """A task for row 0 with two completions of at most 5 tokens."""
    fields: dict[str, Any] = {
        "run": RUN,
        "group_id": "learner-1.0",
        "row": 0,
        "prompt_token_ids": [1, 5, 6, 7],
        "group_size": 2,
        "params": SamplingParams(max_new_tokens=5),
        "seed": 7,
        "clock": GENESIS,
        "deadline_s": 60.0,
    }
    return Task(**(fields | changes))


def a_rollout(**changes: Any) -> Rollout:
    """A finished completion of three tokens that ends with EOS (token 2)."""
    fields: dict[str, Any] = {
        "index": 0,
        "token_ids": [4, 5, 2],
        "sampler_logprobs": [-0.5, -0.25, -0.125],
        "finish": FinishReason.STOP,
    }
    return Rollout(**(fields | changes))


def a_group(task: Task | None = None, **changes: Any) -> RolloutGroup:
    """A complete group for ``task`` by sampler-1."""
    task = task or a_task()
    fields: dict[str, Any] = {
        "run": task.run,
        "group_id": task.group_id,
        "task": np.frombuffer(encode(task, an_identity()), np.uint8),
        "sampler": "sampler-1",
        "engine": "fake",
        "clock": task.clock,
        "generation_s": 0.1,
        "rollouts": tuple(a_rollout(index=i) for i in range(task.group_size)),
    }
    return RolloutGroup(**(fields | changes))


def a_verified_group(
    group: RolloutGroup | None = None, rewards: tuple[float | None, ...] = (1.0, 0.0)
) -> VerifiedGroup:
    """``group`` with one verdict per reward, by verifier-1."""
    group = group or a_group()
    return VerifiedGroup(
        run=group.run,
        group_id=group.group_id,
        group=np.frombuffer(encode(group, an_identity("sampler-1")), np.uint8),
        verifier="verifier-1",
        verdicts=tuple(
            Verdict(index=r.index, reward=v) for r, v in zip(group.rollouts, rewards, strict=True)
        ),
        scoring_s=0.01,
    )


def a_runspec(**changes: Any) -> RunSpec:
    """A run on the tiny model and the generated task."""
    fields: dict[str, Any] = {
        "name": RUN,
        "model": {"ref": "builtin:tiny"},
        "lora": {"rank": 4, "alpha": 8},
        "tasks": {"source": "builtin:sort-digits", "template": "{prompt}"},
        "rewards": [{"name": "exact"}],
        "sampling": {"max_new_tokens": 5},
        "store": {"url": "file:///nowhere"},
    }
    return RunSpec.model_validate(fields | changes)


def an_entry(path: str = "test/updates/learner-1/1-abc", **changes: Any) -> tuple[Manifest, dict[str, bytes]]:
    """A signed manifest of learner-1's first update, and its two files."""
    files = changes.pop("files", {"update.safetensors": b"factors" * 100, "notes.txt": b""})
    signer = changes.pop("signer", an_identity())
    fields: dict[str, Any] = {
        "path": path,
        "kind": EntryKind.UPDATE,
        "run": RUN,
        "author": "learner-1",
        "clock": a_clock(**{"learner-1": 1}),
        "count": 1,
        "weight": 1.0,
        "files": Manifest.describe(files),
    }
    return Manifest(**(fields | changes)).signed(signer), files
