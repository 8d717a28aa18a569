"""How long does one update of the tiny task take to sample, with and without a switch before every batch?"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import structlog

from bench.harness import Goal, report, say
from node.tiny_model import PROMPT_TOKENS, tiny_model
from protocol.messages import SamplingParams
from protocol.runspec import LoraSpec
from roles.policy.compose import Factors
from roles.sampler.engine import SampleRequest
from roles.sampler.transformers_engine import TransformersEngine

TINY_BATCH_MS = 55.0
"""Goal for 16 groups of 8 rows and 5 new tokens on the tiny model, one thread: what one synchronous loop
with a batch of its own takes."""


def arguments() -> argparse.Namespace:
    """What to measure; the defaults are one update of the tiny task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="a model's directory; without it, the tiny model untrained"
    )
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="completions of a group")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--tokens", type=int, default=5, help="new tokens of a completion at most")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    return parser.parse_args()


def eos_ids(model_dir: Path) -> list[int]:
    """As the model's own configuration lists them."""
    files = [model_dir / "generation_config.json", model_dir / "config.json"]
    settings = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    found = next(s["eos_token_id"] for s in settings if s.get("eos_token_id") is not None)
    return found if isinstance(found, list) else [found]


def some_factors(shapes: Factors, seed: int) -> Factors:
    """Small random factors."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.02, shape.shape).astype(np.float32) for name, shape in shapes.items()}


def requests(options: argparse.Namespace, policy: str, seed: int) -> list[SampleRequest]:
    """One batch: different prompts of one length."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(max_new_tokens=options.tokens)
    prompts = rng.integers(3, 40, (options.groups, options.prompt_tokens), np.int32)
    return [
        SampleRequest(prompt, options.rows, params, seed + i, policy, deadline_s=3600.0)
        for i, prompt in enumerate(prompts)
    ]


async def batches(
    engine: TransformersEngine, options: argparse.Namespace, policies: Sequence[str]
) -> tuple[float, float]:
    """Median milliseconds of a batch and tokens a second, with the policies in turn."""
    times, tokens = [], 0
    for repeat in range(options.repeats):
        todo = requests(options, policies[repeat % len(policies)], seed=1000 * repeat)
        start = time.perf_counter()
        groups = await asyncio.gather(*(engine.sample(request) for request in todo))
        times.append(time.perf_counter() - start)
        tokens += sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    return median(times) * 1e3, tokens / sum(times)


async def measure(options: argparse.Namespace, model_dir: Path) -> None:
    """Load, warm up, measure, report."""
    engine = TransformersEngine.open(
        model_dir,
        LoraSpec(rank=options.rank, alpha=2.0 * options.rank),
        eos_ids(model_dir),
        device=options.device,
        dtype=options.dtype,
        rows_max=options.groups * options.rows,
        groups_per_batch=options.groups,
        threads=options.threads,
    )
    load_ms = []
    for version in range(2):
        factors = some_factors(engine.shapes, version)
        start = time.perf_counter()
        await engine.load_policy(f"policy-{version}", factors, newest=True)
        load_ms.append((time.perf_counter() - start) * 1e3)
    say(f"{engine.name}: {options.groups} groups of {options.rows} rows, {options.tokens} new tokens")
    await asyncio.gather(*(engine.sample(request) for request in requests(options, "policy-0", seed=0)))
    batch_ms, tokens_per_s = await batches(engine, options, ["policy-0"])
    say(f"one policy: {batch_ms:.1f} ms a batch; now with a switch before every batch")
    switched_ms, _ = await batches(engine, options, ["policy-0", "policy-1"])
    await engine.close()
    figures: dict[str, float | int | str | bool | None] = {
        "engine": engine.name,
        "groups": options.groups,
        "rows": options.rows,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.tokens,
        "threads": options.threads,
        "batch_ms": batch_ms,
        "tokens_per_s": tokens_per_s,
        "batch_with_switch_ms": switched_ms,
        "load_policy_ms": min(load_ms),
    }
    is_the_goal = options.model is None and (options.groups, options.rows, options.tokens) == (16, 8, 5)
    report(figures, [Goal("batch_ms", batch_ms, at_most=TINY_BATCH_MS)] if is_the_goal else [])


def main() -> None:
    """Measure the model that was asked for."""
    options = arguments()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory() as cache_dir:
        model_dir = options.model or tiny_model(Path(cache_dir), seed=0, steps=1)
        asyncio.run(measure(options, model_dir))


if __name__ == "__main__":
    main()
