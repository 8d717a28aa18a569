"""How fast do engines sample groups of a small language model on the CPU, against the machine's ceilings?

Each arm runs in a process of its own: ``model.generate`` for one group after the other, transformers' own
continuous batching, a vLLM server of another environment if one is named, and this project's engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.harness import Figure, Goal, report, say, timed_ms
from bench.sampling.work import Work

SPEED_VS_GENERATE = 2.0
MODEL = Path(".grpo/models/smollm2-135m-instruct")
ARMS = {
    "generate": "bench.sampling.generate",
    "continuous": "bench.sampling.continuous",
    "ours": "bench.sampling.ours",
}


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="make it with examples/smollm2.py")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a completion at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=[*ARMS, "vllm"], choices=[*ARMS, "vllm"])
    parser.add_argument(
        "--vllm-python", help="interpreter of an environment with vLLM; without it, no such arm"
    )
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    return parser.parse_args()


def run(module: str, work: Work) -> dict[str, float]:
    """One arm in a process of its own."""
    # Threads that spin while they wait take the cores from those that compute.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(work.threads)}
    command = [sys.executable, "-m", module, json.dumps(asdict(work))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith('{"sampled"'):
            found: dict[str, float] = json.loads(line)["sampled"]
            return found
    raise SystemExit(f"{module} failed:\n{done.stderr[-2000:]}")


def ceilings(work: Work, rows: float) -> dict[str, float]:
    """Tokens a second of so many rows that this machine could decode, by its memory and by its arithmetic.

    Every step reads all weights, each prompt once and on average half of each completion; every token
    multiplies with all weights.
    """
    torch.set_num_threads(work.threads)
    config = json.loads((work.directory / "config.json").read_text("utf-8"))
    numbers = sum(_numbers(file) for file in work.directory.glob("*.safetensors"))
    kv_heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_bytes = 2 * config["num_hidden_layers"] * kv_heads * size * 4
    held = work.groups * work.prompt_tokens + rows * work.new_tokens / 2
    memory = torch.ones(128 << 20)
    square = torch.randn(1024, 1024)
    bytes_per_s = 4 * memory.numel() / timed_ms(memory.sum, repeats=9) * 1e3
    flops = 2 * 1024**3 / timed_ms(lambda: square @ square, repeats=9) * 1e3
    return {
        "memory_gb_per_s": bytes_per_s / 1e9,
        "gflop_per_s": flops / 1e9,
        "memory_ceiling": rows * bytes_per_s / (4 * numbers + held * kv_bytes),
        "arithmetic_ceiling": flops / (2 * numbers),
    }


def _numbers(file: Path) -> int:
    """Parameters in a safetensors file of fp32."""
    return file.stat().st_size // 4


def main() -> None:
    """Measure every arm for every number of groups."""
    options = arguments()
    if not (options.model / "config.json").exists():
        raise SystemExit(f"there is no model in {options.model}: python examples/smollm2.py")
    modules = dict(ARMS)
    if options.vllm_python:
        modules["vllm"] = "bench.sampling.vllm_server"
    figures: dict[str, Figure] = {}
    speeds: dict[tuple[str, int], float] = {}
    for groups in options.groups:
        for arm in [arm for arm in options.arms if arm in modules]:
            work = Work(arm, str(options.model), groups, new_tokens=options.tokens, threads=options.threads)
            if arm == "vllm":
                work = Work(**{**asdict(work), "python": options.vllm_python})
            found: dict[str, Any] = run(modules[arm], work)
            speeds[arm, groups] = found["tokens_per_s"]
            figures |= {f"{arm}_{groups}_{name}": value for name, value in found.items()}
            speed, first_s = found["tokens_per_s"], found["first_group_s"]
            say(f"{arm}, {groups} groups: {speed:.1f} tokens/s, first after {first_s:.1f} s")
            if arm == "ours":
                rows = found["tokens"] / found["longest"]
                ceiling = ceilings(work, rows)
                figures |= {f"machine_{groups}_{name}": value for name, value in ceiling.items()}
                figures[f"ours_{groups}_share_of_memory_ceiling"] = (
                    found["tokens_per_s"] / ceiling["memory_ceiling"]
                )
                lower = min(ceiling["memory_ceiling"], ceiling["arithmetic_ceiling"])
                figures[f"ours_{groups}_share_of_ceiling"] = found["tokens_per_s"] / lower
    most = max(options.groups)
    bounds = {"generate": SPEED_VS_GENERATE, "continuous": 1.0, "vllm": 1.0}
    names = {
        "generate": "speed_vs_generate",
        "continuous": "speed_vs_continuous_batching",
        "vllm": "speed_vs_vllm",
    }
    goals = [
        Goal(names[arm], speeds["ours", most] / speeds[arm, most], at_least=bound)
        for arm, bound in bounds.items()
        if (arm, most) in speeds and ("ours", most) in speeds
    ]
    report(figures, goals)


if __name__ == "__main__":
    main()
