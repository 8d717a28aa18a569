"""Do vLLM's log-probabilities agree with the learner's, and how fast does it sample?

Starts vLLM by ``--vllm-command`` as a sampler does, samples groups under the base model (B zero) and under
random adapters, and scores the same tokens with the learner's model. ``mean_ratio`` is the mean over tokens
of exp(learner - sampler); ``max`` and ``p99`` are of its log's absolute value. Then tokens a second of groups
of 8 at several numbers of groups at once, under an adapter, with EOS ignored.

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
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from bench.harness import Figure, Goal, report, say
from bench.tiny_batch import eos_ids
from node.engines import open_vllm
from node.models import LocalModel, resolve_model
from node.settings import NodeSettings, VllmSettings
from node.tiny_model import tiny_model
from protocol.messages import Rollout, SamplingParams
from protocol.runspec import LoraSpec, ModelSpec, RunSpec
from roles.policy.compose import Factors
from roles.sampler.engine import SampleRequest
from roles.sampler.vllm_engine import VllmEngine

TOLERANCE = 1e-4
"""Largest difference of log-probabilities in fp32."""

GROUP = 8


class Scorer:
    """The learner's model, which scores tokens that somebody else sampled."""

    def __init__(self, model_dir: Path, lora: LoraSpec) -> None:
        import torch

        from roles.learner.torch_adapter import factor_parameters, open_adapter

        self._model = open_adapter(model_dir, ModelSpec(ref="local"), lora, torch.device("cpu"))
        self._parameters = factor_parameters(self._model)

    def load(self, factors: Factors) -> None:
        """Score under these factors from now on."""
        import torch

        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(factors[name]))

    def logprobs(
        self, prompt: NDArray[Any], tokens: NDArray[Any], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """Log-probabilities [T] of ``tokens`` after ``prompt``, without truncation."""
        import torch

        ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
        with torch.inference_mode():
            logits = self._model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
        chosen = torch.log_softmax(logits / temperature, -1).gather(1, ids[len(prompt) :, None])
        result: NDArray[np.float32] = chosen[:, 0].numpy()
        return result


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's directory; without it, the tiny model")
    parser.add_argument("--vllm-command", required=True)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--groups", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    return parser.parse_args()


def a_run(model: Path, options: argparse.Namespace, rank: int) -> RunSpec:
    """A run of this model whose adapters have ``rank``."""
    return RunSpec.model_validate(
        {
            "name": "bench",
            "model": {"ref": str(model), "dtype": options.dtype},
            "lora": {"rank": rank, "alpha": 2.0 * rank},
            "tasks": {"source": "builtin:sort-digits", "prompt_tokens_max": options.prompt_tokens},
            "sampling": {"max_new_tokens": options.tokens},
            "rewards": [{"name": "exact"}],
            "store": {"url": "file:///nowhere"},
        }
    )


def adapter(shapes: Factors, size: float) -> Factors:
    """Random factors of a size that changes what the model says; 0 leaves the base model."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape.shape) * (size if ".lora_B." in name else 0.05)).astype(np.float32)
        for name, shape in shapes.items()
    }


def a_request(options: argparse.Namespace, vocab_size: int, seed: int) -> SampleRequest:
    """A group on a prompt of its own."""
    prompt = np.random.default_rng(seed).integers(3, vocab_size, options.prompt_tokens).astype(np.int32)
    params = SamplingParams(max_new_tokens=options.tokens, temperature=options.temperature)
    return SampleRequest(prompt, GROUP, params, seed, None, deadline_s=3600.0)


def agreement(
    scorer: Scorer, request: SampleRequest, rollouts: tuple[Rollout, ...], name: str
) -> dict[str, Figure]:
    """How far sampler and learner are apart on the same tokens."""
    apart = np.concatenate(
        [
            scorer.logprobs(request.prompt_token_ids, rollout.token_ids, request.params.temperature)
            - rollout.sampler_logprobs
            for rollout in rollouts
        ]
    )
    return {
        f"{name}_tokens": len(apart),
        f"{name}_max": float(np.abs(apart).max()),
        f"{name}_p99": float(np.quantile(np.abs(apart), 0.99)),
        f"{name}_mean_ratio": float(np.exp(apart).mean()),
    }


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
    """One server for each rank."""
    figures: dict[str, Figure] = {"dtype": options.dtype, "temperature": options.temperature}
    settings = NodeSettings(
        run="bench",
        roles=("sampler",),
        broker="nats://127.0.0.1",
        device="cpu",
        threads=options.threads,
        rows_max=GROUP * max(options.groups or [1]),
        engine="vllm",
        vllm=VllmSettings(command=options.vllm_command),
    )
    for rank in options.ranks:
        spec = a_run(model.directory, options, rank)
        start = time.perf_counter()
        engine = await open_vllm(spec, settings, model, eos_ids(model.directory), home)
        figures[f"start_rank_{rank}_s"] = time.perf_counter() - start
        scorer = await asyncio.to_thread(Scorer, model.directory, spec.lora)
        for name, size in (("base", 0.0), (f"rank_{rank}", 0.05)):
            factors = adapter(engine.shapes, size)
            start = time.perf_counter()
            await engine.load_policy(name, factors, newest=True)
            figures[f"load_rank_{rank}_s"] = time.perf_counter() - start
            request = a_request(options, model.vocab_size, seed=1)
            sampled = await engine.sample(request)
            scorer.load(factors)
            figures |= await asyncio.to_thread(agreement, scorer, request, sampled.rollouts, name)
            say(f"{name}: {figures[f'{name}_max']:.2g} at most apart")
        if rank == options.ranks[-1]:
            del scorer
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
    exact = options.dtype == "float32"
    largest = [value for name, value in figures.items() if name.endswith("_max")]
    report(figures, [Goal("agreement_max", max(map(float, largest)), at_most=TOLERANCE)] if exact else [])  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
