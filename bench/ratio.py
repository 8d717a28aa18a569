"""How far are samplers' log-probabilities from the learner's, for the same tokens under the same adapter?

The importance ratio of fresh groups is exp(learner - sampler). What an engine samples is scored by the
learner's own recomputation (its layers, packed rows, its head), and once more by a verifier's (PEFT's layers,
padded rows): base, rank-1 and rank-32 adapters, three temperatures, and a top-p, which is scored as it was
drawn, over what the truncation leaves. A token that the learner would have cut off counts as ``outside``.

    python -m bench.ratio --json
    python -m bench.ratio --engines transformers vllm --dtypes float32 bfloat16 \
        --vllm-command ".venv-vllm/bin/python -m vllm.entrypoints.openai.api_server" --json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from bench.harness import Figure, Goal, report, say
from bench.sampler import MODEL
from bench.scoring.learner import LearnerScorer
from bench.tiny_batch import eos_ids
from node.engines import open_engine
from node.models import LocalModel, resolve_model
from node.settings import ENGINES, NodeSettings, VllmSettings
from protocol.messages import SamplingParams
from protocol.runspec import ModelSpec, RunSpec
from roles.policy.adapter_shapes import adapter_shapes
from roles.policy.compose import Factors
from roles.sampler.engine import Engine, Sampled, SampleRequest
from roles.verifier.torch_recompute import Recomputer

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.4, "float16": 0.05}
"""Largest difference of log-probabilities that rounding explains, without truncation."""

EDGE = 1e-3
"""Within which 99 of 100 tokens of a truncated distribution must agree in fp32."""

MEAN_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.002}
"""Largest distance of the mean ratio from 1."""

ADAPTERS = {"base": (1, 0.0), "rank1": (1, 0.05), "rank32": (32, 0.02)}
"""Rank, and standard deviation of the entries of B."""

CASES: dict[str, dict[str, Any]] = {
    "t0.7": {"temperature": 0.7},
    "t1.0": {},
    "t1.3": {"temperature": 1.3},
    "t1.0_p0.9": {"top_p": 0.9},
}


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="make it with examples/smollm2.py")
    parser.add_argument("--engines", nargs="+", default=["transformers"], choices=ENGINES)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=TOLERANCE)
    parser.add_argument("--adapters", nargs="+", default=[*ADAPTERS], choices=ADAPTERS)
    parser.add_argument("--vllm-command", help="what starts a vLLM server")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    return parser.parse_args()


def some_factors(shapes: Factors, size: float) -> Factors:
    """A random adapter; with ``size`` 0 it changes nothing."""
    rng = np.random.default_rng(0)
    spread = {True: size, False: 0.05}
    return {n: rng.normal(0, spread[".lora_B." in n], t.shape).astype(np.float32) for n, t in shapes.items()}


def a_run(options: argparse.Namespace, dtype: str, rank: int) -> RunSpec:
    """A run whose policies have ``rank``."""
    return RunSpec.model_validate(
        {
            "name": "bench",
            "model": {"ref": str(options.model.resolve()), "dtype": dtype},
            "lora": {"rank": rank, "alpha": 2.0 * rank},
            "tasks": {"source": "builtin:sort-digits", "prompt_tokens_max": options.prompt_tokens},
            "sampling": {"max_new_tokens": options.tokens},
            "rewards": [{"name": "exact"}],
            "store": {"url": "file:///nowhere"},
        }
    )


def some_requests(
    options: argparse.Namespace, vocab_size: int, params: SamplingParams
) -> list[SampleRequest]:
    """Groups on random prompts, the same for every engine."""
    prompts = np.random.default_rng(0).integers(
        3, vocab_size, (options.groups, options.prompt_tokens), np.int32
    )
    return [SampleRequest(p, options.rows, params, n, None, 1e6) for n, p in enumerate(prompts)]


@dataclass
class Apart:
    """Recomputed minus reported log-probabilities of an engine's tokens."""

    learner: list[NDArray[np.float64]] = field(default_factory=list)
    verifier: list[NDArray[np.float64]] = field(default_factory=list)

    def figures(self, name: str) -> dict[str, Figure]:
        """Largest, 99th percentile and mean ratio against the learner; the largest against the verifier."""
        found = np.concatenate(self.learner)
        inside = found[np.isfinite(found)]
        second = np.concatenate(self.verifier)
        return {
            f"{name}_tokens": len(found),
            f"{name}_max": float(np.abs(inside).max()),
            f"{name}_p99": float(np.quantile(np.abs(inside), 0.99)),
            f"{name}_mean_ratio": float(np.exp(inside).mean()),
            f"{name}_outside": int(len(found) - len(inside)),
            f"{name}_verifier_max": float(np.abs(second[np.isfinite(second)]).max()),
        }


class Judges:
    """Those who score the tokens of a run."""

    def __init__(self, spec: RunSpec, model: LocalModel, device: str) -> None:
        self._learner = LearnerScorer(model.directory, spec.model, spec.lora, device)
        eos = eos_ids(model.directory)
        self._verifier = Recomputer.open(model.directory, spec.model, spec.lora, eos, device)

    def apart(self, policy: str, factors: Factors, request: SampleRequest, sampled: Sampled) -> Apart:
        """How far they are from what the sampler reports."""
        completions = [rollout.token_ids for rollout in sampled.rollouts]
        reported = [rollout.sampler_logprobs.astype(np.float64) for rollout in sampled.rollouts]
        prompt, params = request.prompt_token_ids, request.params
        self._learner.load(factors)
        learners = self._learner.logprobs(prompt, completions, params)
        facts = self._verifier.facts(policy, factors, prompt, completions, params)
        return Apart(
            [ours - theirs for ours, theirs in zip(learners, reported, strict=True)],
            [fact.logprobs - theirs for fact, theirs in zip(facts, reported, strict=True)],
        )


async def opened(
    options: argparse.Namespace, kind: Any, spec: RunSpec, model: LocalModel, home: Path
) -> Engine:
    """An engine as a sampler of the run has it."""
    settings = NodeSettings(
        run=spec.name,
        roles=("sampler",),
        broker="nats://127.0.0.1",
        device=options.device,
        threads=options.threads,
        engine=kind,
        vllm=VllmSettings(options.vllm_command) if kind == "vllm" else VllmSettings(),
    )
    return await open_engine(spec, settings, model, eos_ids(model.directory), home)


async def measure_arm(
    options: argparse.Namespace, kind: str, dtype: str, model: LocalModel, home: Path
) -> dict[str, Apart]:
    """One engine in one precision: every adapter in every case."""
    found: dict[str, Apart] = {}
    chosen = {name: ADAPTERS[name] for name in options.adapters}
    for rank, adapters in itertools.groupby(chosen.items(), key=lambda item: item[1][0]):
        spec = a_run(options, dtype, rank)
        judges = await asyncio.to_thread(Judges, spec, model, options.device)
        shapes = adapter_shapes(model.directory, spec.lora)
        engine = await opened(options, kind, spec, model, home)
        try:
            for name, (_, size) in adapters:
                factors = some_factors(shapes, size)
                await engine.load_policy(name, factors, newest=True)
                for case, changes in CASES.items():
                    params = SamplingParams(max_new_tokens=options.tokens, **changes)
                    requests = some_requests(options, model.vocab_size, params)
                    groups = await asyncio.gather(*(engine.sample(request) for request in requests))
                    apart = found[f"{name}_{case}"] = Apart()
                    for request, group in zip(requests, groups, strict=True):
                        one = await asyncio.to_thread(judges.apart, name, factors, request, group)
                        apart.learner += one.learner
                        apart.verifier += one.verifier
                    figures = apart.figures("")
                    say(
                        f"{kind} {dtype} {name} {case}: "
                        + " ".join(f"{k[1:]} {v:.3g}" for k, v in figures.items())
                    )
        finally:
            await engine.close()
    return found


def goals(arm: str, dtype: str, found: dict[str, Apart]) -> Iterator[Goal]:
    """What an engine must keep to.

    Rounding decides about a token at the very edge of a truncation, which moves the mass of what is left by
    its own. Such cases are judged by their 99th percentile, and in fp32 only.
    """
    figures: dict[str, dict[str, Any]] = {case: apart.figures("of") for case, apart in found.items()}
    whole = [some for case, some in figures.items() if "_p" not in case]
    cut = [some for case, some in figures.items() if "_p" in case]
    tolerance, mean_tolerance = TOLERANCE[dtype], MEAN_TOLERANCE[dtype]
    yield Goal(f"{arm}_max", max(some["of_max"] for some in whole), at_most=tolerance)
    yield Goal(f"{arm}_verifier_max", max(some["of_verifier_max"] for some in whole), at_most=tolerance)
    bias = max(abs(some["of_mean_ratio"] - 1) for some in whole)
    yield Goal(f"{arm}_mean_ratio_bias", bias, at_most=mean_tolerance)
    if dtype == "float32":
        yield Goal(f"{arm}_truncated_p99", max(some["of_p99"] for some in cut), at_most=EDGE)
        yield Goal(f"{arm}_outside", float(sum(some["of_outside"] for some in cut)), at_most=0)


def measure(options: argparse.Namespace, home: Path) -> tuple[dict[str, Figure], Sequence[Goal]]:
    """Every engine in every precision."""
    model = resolve_model(ModelSpec(ref=str(options.model.resolve())), home)
    figures: dict[str, Figure] = {}
    met: list[Goal] = []
    for kind, dtype in itertools.product(options.engines, options.dtypes):
        arm = f"{kind}_{dtype}"
        found = asyncio.run(measure_arm(options, kind, dtype, model, home))
        for case, apart in found.items():
            figures |= apart.figures(f"{arm}_{case}")
        met += goals(arm, dtype, found)
    return figures, met


def main() -> None:
    """Measure and report."""
    options = arguments()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory() as home:
        report(*measure(options, Path(home)))


if __name__ == "__main__":
    main()
