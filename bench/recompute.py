"""What does gradient checkpointing save, and what does it cost?

One learner step over random rows, on a model of SmolLM2-135M's shape with random weights, with layers kept
and with layers recomputed, each in a process of its own so that its peak of memory is its own. Time is
processor time on one thread, which neighbours disturb little. ``--rows N`` and ``--tokens N`` set the
micro-batch. The gradient norms must be equal.

    python -m bench.recompute --json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Goal, report, say
from bench.steps.arm import forget_peak, held_bytes, peak_bytes

STEPS = 3


def save_model(directory: Path) -> None:
    """A model of SmolLM2-135M's shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def a_spec(options: argparse.Namespace) -> Any:
    """A run whose step is one micro-batch."""
    from protocol.runspec import RunSpec

    return RunSpec.model_validate(
        {
            "name": "bench",
            "model": {"ref": "local"},
            "tasks": {"source": "builtin:sort-digits"},
            "rewards": [{"name": "exact"}],
            "learner": {
                "micro_batch_tokens": options.rows * options.tokens,
                "gradient_checkpointing": options.arm == "recomputed",
            },
            "store": {"url": "file:///nowhere"},
        }
    )


def arm(options: argparse.Namespace) -> dict[str, float]:
    """Load, warm up, measure."""
    import numpy as np
    import torch

    from roles.learner.policy import Sample
    from roles.learner.torch_policy import TorchPolicy

    torch.set_num_threads(1)
    policy = TorchPolicy.open(options.model, a_spec(options))
    rng = np.random.default_rng(0)
    half = options.tokens // 2
    samples = [
        Sample(
            prompt_token_ids=rng.integers(3, 49152, half).astype(np.int32),
            token_ids=rng.integers(3, 49152, half).astype(np.int32),
            sampler_logprobs=np.full(half, -10.8, np.float32),
            advantage=1.0 if row % 2 else -1.0,
            truncated=False,
            temperature=1.0,
        )
        for row in range(options.rows)
    ]
    for parameter in policy._causal.parameters():  # noqa: SLF001  # touched, so that loaded means resident
        parameter.detach().sum()
    loaded = held_bytes()
    forget_peak()
    seconds = []
    for _ in range(STEPS):
        policy.load(policy.genesis(0))
        started = time.process_time()
        metrics = policy.step(samples, 0).metrics
        seconds.append(time.process_time() - started)
    return {
        "step_cpu_s": min(seconds),
        "added_bytes": peak_bytes() - loaded,
        "loaded_bytes": loaded,
        "grad_norm": metrics["grad_norm"],
    }


def main() -> None:
    """Both arms, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=["kept", "recomputed"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(arm(options)))
        return
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        save_model(Path(place))
        for name in ("kept", "recomputed"):
            say(f"layers {name}: {STEPS} steps of {options.rows} rows of {options.tokens} tokens")
            sizes = ["--rows", str(options.rows), "--tokens", str(options.tokens)]
            command = [sys.executable, "-m", "bench.recompute", "--arm", name, "--model", place, *sizes]
            lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            found[name] = json.loads(lines[-1])
    kept, recomputed = found["kept"], found["recomputed"]
    report(
        {f"{name}_{key}": value for name, arm in found.items() for key, value in arm.items()}
        | {
            "memory_ratio": recomputed["added_bytes"] / kept["added_bytes"],
            "time_ratio": recomputed["step_cpu_s"] / kept["step_cpu_s"],
        },
        [Goal("grad_norm_ratio", recomputed["grad_norm"] / kept["grad_norm"], at_least=1.0, at_most=1.0)],
    )


if __name__ == "__main__":
    main()
