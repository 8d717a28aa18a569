"""How fast does vLLM start, take an adapter, and sample?

Starts vLLM by ``--vllm-command`` as a sampler does; then tokens a second of groups of 8 at several numbers of
groups at once, under an adapter, with EOS ignored. Whether its log-probabilities are true is ``bench.ratio``.

    python -m bench.vllm --model .grpo/models/smollm2-135m-instruct \
        --vllm-command ".venv-vllm/bin/python -m vllm.entrypoints.openai.api_server" --json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog

from bench.harness import Figure, report, say
from bench.tiny_batch import eos_ids
from node.engines import open_vllm
from node.models import LocalModel, resolve_model
from node.settings import NodeSettings, VllmSettings
from node.tiny_model import tiny_model
from protocol.messages import SamplingParams
from protocol.runspec import ModelSpec, RunSpec
from roles.policy.compose import Factors
from roles.sampler.engine import SampleRequest
from roles.sampler.vllm_engine import VllmEngine

GROUP = 8


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's directory; without it, the tiny model")
    parser.add_argument("--vllm-command", required=True)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    return parser.parse_args()


def a_run(model: Path, options: argparse.Namespace) -> RunSpec:
    """A run of this model."""
    return RunSpec.model_validate(
        {
            "name": "bench",
            "model": {"ref": str(model), "dtype": options.dtype},
            "lora": {"rank": options.rank, "alpha": 2.0 * options.rank},
            "tasks": {"source": "builtin:sort-digits", "prompt_tokens_max": options.prompt_tokens},
            "sampling": {"max_new_tokens": options.tokens},
            "rewards": [{"name": "exact"}],
            "store": {"url": "file:///nowhere"},
        }
    )


def adapter(shapes: Factors) -> Factors:
    """Random factors."""
    rng = np.random.default_rng(0)
    return {
        name: (0.05 * rng.standard_normal(shape.shape)).astype(np.float32) for name, shape in shapes.items()
    }


def a_request(options: argparse.Namespace, vocab_size: int, seed: int) -> SampleRequest:
    """A group on a prompt of its own."""
    prompt = np.random.default_rng(seed).integers(3, vocab_size, options.prompt_tokens).astype(np.int32)
    params = SamplingParams(max_new_tokens=options.tokens)
    return SampleRequest(prompt, GROUP, params, seed, None, deadline_s=3600.0)


async def speed(engine: VllmEngine, options: argparse.Namespace, vocab_size: int) -> dict[str, Figure]:
    """Tokens a second with so many groups at once."""
    figures: dict[str, Figure] = {}
    seeds = itertools.count(1000)
    for groups in options.groups:
        todo = [a_request(options, vocab_size, next(seeds)) for _ in range(groups)]
        start = time.perf_counter()
        done = await asyncio.gather(*(engine.sample(request) for request in todo))
        took_s = time.perf_counter() - start
        tokens = sum(len(rollout.token_ids) for group in done for rollout in group.rollouts)
        figures[f"tokens_per_s_{groups}_groups"] = tokens / took_s
        say(f"{groups} groups: {tokens} tokens in {took_s:.1f} s")
    return figures


async def measure(options: argparse.Namespace, model: LocalModel, home: Path) -> dict[str, Figure]:
    """Start, load, sample."""
    settings = NodeSettings(
        run="bench",
        roles=("sampler",),
        broker="nats://127.0.0.1",
        device="cpu",
        threads=options.threads,
        rows_max=GROUP * max(options.groups),
        engine="vllm",
        vllm=VllmSettings(command=options.vllm_command),
    )
    start = time.perf_counter()
    engine = await open_vllm(a_run(model.directory, options), settings, model, eos_ids(model.directory), home)
    figures: dict[str, Figure] = {"rank": options.rank, "start_s": time.perf_counter() - start}
    start = time.perf_counter()
    await engine.load_policy("v1", adapter(engine.shapes), newest=True)
    figures["load_s"] = time.perf_counter() - start
    _ignore_eos(engine)
    figures |= await speed(engine, options, model.vocab_size)
    await engine.close()
    return figures


def _ignore_eos(engine: VllmEngine) -> None:
    """No token ends a completion any more: each has its full length."""
    engine._served = replace(engine._served, eos_ids=frozenset())  # noqa: SLF001


def main() -> None:
    """Measure the model that was asked for."""
    options = arguments()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        folder = options.model or tiny_model(home, 0)
        model = resolve_model(ModelSpec(ref=str(folder.resolve())), home)
        figures = asyncio.run(measure(options, model, home))
    report(figures)


if __name__ == "__main__":
    main()
