"""Composition: the policy of a clock is genesis plus one cumulative update per learner.

    policy(c) = genesis + sum over learners i, in sorted order, of update_i[c_i]

All sums are fp32 and in sorted learner order, so equal clocks give equal bytes on every machine. The
result's digest is signed into each update's manifest; a peer that composes another digest refuses it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.clock import VectorClock

WEIGHTS_FILE = "adapter_model.safetensors"
"""Name of the weights in genesis and exports; PEFT's own."""

UPDATE_FILE = "update.safetensors"
"""Name of an update's cumulative change in the store."""

VERSION_ROUNDING = 1e-9
"""Versions are sums of weights such as 1/3: two that differ by no more than this are the same."""

Factors = dict[str, NDArray[Any]]
"""LoRA factors by PEFT tensor name (``base_model.model.….lora_A.weight``), fp32, A [r, in], B [out, r]."""


def compose(genesis: Factors, updates: Mapping[str, Factors]) -> Factors:
    """Add each learner's cumulative update to genesis, in sorted learner order.

    Every update must have exactly the tensors of genesis (``fault`` tells); raises KeyError otherwise.
    """
    learners = sorted(updates)
    return {
        name: composed(tensor, [updates[learner][name] for learner in learners])
        for name, tensor in genesis.items()
    }


def composed(genesis: NDArray[Any], updates: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One factor of a policy: genesis and the updates of its learners, in the order given."""
    total = genesis.astype(np.float32, copy=not updates)
    for update in updates:
        total = total + update.astype(np.float32, copy=False)
    return total


def version_of(weights: Iterable[float]) -> float:
    """The version of a policy from the summed weights of each learner in its clock.

    Rounded once, at the end, so that the order of the learners cannot change it.
    """
    return math.fsum(weights)


def whole_updates(version: float) -> int:
    """How many updates of weight 1 a version is worth, by which learning rate and warm-up go."""
    return math.floor(version + VERSION_ROUNDING)


def fault(candidate: Factors, genesis: Factors) -> str | None:
    """Why ``candidate`` cannot be an adapter or update of this run, or None if it can.

    Checks names, shapes, dtypes and finiteness before a single number is used.
    """
    if missing := sorted(genesis.keys() - candidate.keys()):
        return f"{len(missing)} of {len(genesis)} tensors are missing, first {missing[0]}"
    if extra := sorted(candidate.keys() - genesis.keys()):
        return f"{len(extra)} unknown tensors, first {extra[0]}"
    for name, expected in genesis.items():
        tensor = candidate[name]
        if tensor.shape != expected.shape:
            return f"{name} has shape {tensor.shape}, not {expected.shape}"
        if tensor.dtype != np.float32:
            return f"{name} is {tensor.dtype}, not float32"
        if not np.isfinite(tensor).all():
            return f"{name} is not finite"
    return None


def factors_digest(factors: Factors) -> str:
    """sha256 over names, shapes and little-endian fp32 bytes in sorted name order."""
    digest = hashlib.sha256()
    for name in sorted(factors):
        tensor = np.ascontiguousarray(factors[name], dtype="<f4")
        digest.update(f"{name}{tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def policy_name(clock: VectorClock, digest: str) -> str:
    """The engine-side name of a policy. It names bytes, so it is never reused for other weights."""
    return f"policy-{clock.digest[:8]}-{digest[:32]}"
