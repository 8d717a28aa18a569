"""What do updates cost as float32 and as bfloat16, in bytes and in time to make, write, read and compose?

The adapter is rank 16 on all linear layers of SmolLM2-135M; the numbers in it are random. A policy is
composed of four learners' updates.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import numpy as np

from bench.harness import Figure, Goal, report, say, timed_ms
from protocol.learner_spec import LearnerSpec
from roles.learner.register import Register
from roles.policy.compose import Factors, compose, factors_digest, fault
from roles.policy.norm_bound import step_norm
from roles.policy.peft_export import factors_bytes, read_factors

LAYERS, HIDDEN, KEYS, INNER = 30, 576, 192, 1536
"""SmolLM2-135M: layers, width, width of keys and values (three heads of 64), width of the MLP."""
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Inputs and outputs of a layer's linear maps."""
RANK = 16
LEARNERS = 4
REPEATS = 15
BYTES_RATIO_MAX, READ_MS_MAX = 0.51, 100.0
"""Goals for bfloat16."""


def an_adapter(seed: int, scale: float) -> Factors:
    """Normally distributed factors."""
    generator = np.random.default_rng(seed)
    factors: Factors = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in LINEAR.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                numbers = generator.standard_normal(shape, np.float32)
                factors[f"{prefix}.lora_{part}.weight"] = np.float32(scale) * numbers
    return factors


def measured(dtype: Literal["float32", "bfloat16"], directory: Path) -> dict[str, Figure]:
    """Bytes and milliseconds for one dtype."""
    genesis, settings = an_adapter(0, 0.02), LearnerSpec(update_dtype=dtype)
    registers = [Register(f"learner-{n}", genesis, settings) for n in range(LEARNERS)]
    updates = {}
    for number, register in enumerate(registers):
        step = an_adapter(number + 1, 1e-4)
        goal = {name: tensor + step[name] for name, tensor in genesis.items()}
        updates[f"learner-{number}"] = register.publish(goal, 1 / LEARNERS).update
    register, update = registers[-1], updates["learner-3"]
    goal = {name: tensor + step[name] for name, tensor in register.base.items()}
    file = directory / f"{dtype}.safetensors"
    file.write_bytes(factors_bytes(update, dtype))
    return {
        "file_bytes": file.stat().st_size,
        "publish_ms": timed_ms(lambda: register.copy().publish(goal, 0.25), REPEATS),
        "write_ms": timed_ms(lambda: file.write_bytes(factors_bytes(update, dtype)), REPEATS),
        "read_ms": timed_ms(lambda: read_factors(file, dtype), REPEATS),
        "check_ms": timed_ms(lambda: fault(update, genesis), REPEATS),
        "step_norm_ms": timed_ms(lambda: step_norm(update, genesis, 1.0), REPEATS),
        "compose_ms": timed_ms(lambda: compose(genesis, updates), REPEATS),
        "digest_ms": timed_ms(lambda: factors_digest(genesis), REPEATS),
    }


def main() -> None:
    """Measure and report."""
    numbers = sum(tensor.size for tensor in an_adapter(0, 1.0).values())
    figures: dict[str, Figure] = {"numbers": numbers, "learners": LEARNERS}
    with tempfile.TemporaryDirectory() as directory:
        for dtype in ("float32", "bfloat16"):
            say(dtype)
            for name, value in measured(dtype, Path(directory)).items():
                figures[f"{dtype}/{name}"] = value
    ratio = float(figures["bfloat16/file_bytes"] or 0) / float(figures["float32/file_bytes"] or 1)
    goals = [
        Goal("bfloat16/bytes_to_float32", ratio, at_most=BYTES_RATIO_MAX),
        Goal("bfloat16/read_ms", float(figures["bfloat16/read_ms"] or 0), at_most=READ_MS_MAX),
    ]
    report(figures, goals)


if __name__ == "__main__":
    main()
