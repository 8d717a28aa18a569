"""How far are the sampler's log-probabilities from the learner's, for the same tokens under the same adapter?

The importance ratio of fresh groups is exp(learner - sampler). What the engine samples is scored by the
learner's own recomputation: base, rank-1 and rank-32 adapters, three temperatures, and a top-p.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from bench.harness import Figure, Goal, report, say
from bench.sampler import MODEL
from protocol.messages import SamplingParams
from protocol.runspec import LoraSpec
from roles.policy.compose import Factors
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.transformers_engine import TransformersEngine
from roles.torch_sampling import RowParams, sampling_logits

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""Largest difference of log-probabilities that rounding explains."""

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
    parser.add_argument("--dtype", default="float32", choices=TOLERANCE)
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


def learner_model(options: argparse.Namespace, rank: int, factors: Factors) -> Any:
    """What a learner computes with: PEFT around the same base."""
    weights = getattr(torch, options.dtype)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=weights).to(options.device)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    assert get_peft_model_state_dict(model).keys() == factors.keys()
    set_peft_model_state_dict(model, {name: torch.from_numpy(t.copy()) for name, t in factors.items()})
    return model.eval()


@torch.no_grad()
def differences(model: Any, request: SampleRequest, sampled: Sampled, device: str) -> list[float]:
    """Learner's minus sampler's log-probability of every sampled token.

    A sampler's truncated distribution is scored as it was drawn from: over what the truncation leaves.
    """
    found: list[float] = []
    prompt = request.prompt_token_ids
    params = RowParams.of([request.params], torch.device(device))
    for rollout in sampled.rollouts:
        ids = torch.from_numpy(np.concatenate([prompt, rollout.token_ids]).astype(np.int64)).to(device)
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(sampling_logits(logits, params), -1)
        picked = logprobs.gather(-1, ids[len(prompt) :, None])[:, 0].cpu().numpy()
        found += (picked - rollout.sampler_logprobs).tolist()
    return found


async def measure(options: argparse.Namespace) -> tuple[dict[str, Figure], float]:
    """Every adapter in every case; figures by name, and the largest difference of all."""
    figures: dict[str, Figure] = {}
    worst = 0.0
    rng = np.random.default_rng(0)
    for rank, adapters in itertools.groupby(ADAPTERS.items(), key=lambda item: item[1][0]):
        engine = TransformersEngine.open(
            options.model,
            LoraSpec(rank=rank, alpha=2.0 * rank),
            [2],
            device=options.device,
            dtype=options.dtype,
            rows_max=64,
            groups_per_batch=None,
            threads=options.threads,
        )
        for name, (_, size) in adapters:
            factors = some_factors(engine.shapes, size)
            await engine.load_policy(name, factors, newest=True)
            model = learner_model(options, rank, factors)
            for case, changes in CASES.items():
                params = SamplingParams(max_new_tokens=options.tokens, **changes)
                prompts = rng.integers(
                    3, model.config.vocab_size, (options.groups, options.prompt_tokens), np.int32
                )
                requests = [
                    SampleRequest(p, options.rows, params, n, None, 1e6) for n, p in enumerate(prompts)
                ]
                groups = await asyncio.gather(*(engine.sample(request) for request in requests))
                found = np.array(
                    [
                        difference
                        for request, group in zip(requests, groups, strict=True)
                        for difference in differences(model, request, group, options.device)
                    ]
                )
                sizes = np.abs(found[np.isfinite(found)])
                key = f"{name}_{case}"
                figures |= {
                    f"{key}_max": float(sizes.max()),
                    f"{key}_p99": float(np.quantile(sizes, 0.99)),
                    f"{key}_mean_ratio": float(np.exp(found[np.isfinite(found)]).mean()),
                    f"{key}_outside": int((~np.isfinite(found)).sum()),
                }
                worst = max(worst, float(sizes.max()))
                say(f"{key}: {len(found)} tokens, largest difference {sizes.max():.2e}")
        await engine.close()
    return figures, worst


def main() -> None:
    """Measure and report."""
    options = arguments()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    figures, worst = asyncio.run(measure(options))
    report(figures, [Goal("largest_difference", worst, at_most=TOLERANCE[options.dtype])])


if __name__ == "__main__":
    main()
