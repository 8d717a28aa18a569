"""How far do honest engines disagree? Measures a pair and makes the tolerances of an ``[audit]`` table.

    sampler's engine (its dtype, batches of several shapes) ─▶ groups ─▶ recomputed ─▶ statistics

Half of the groups sets the limits, the other half tells how often honest groups exceed them. Both sides
carry an adapter, a random one of the size of a trained one, since genesis adds nothing to the base model.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from node.devices import choose_device, only_device
from node.models import load_tokenizer, resolve_model, stop_token_ids
from protocol.audit_spec import ToleranceSpec
from protocol.clock import GENESIS
from protocol.messages import Rollout, SamplingParams, Task
from protocol.runspec import RunSpec
from roles.policy.compose import Factors
from roles.sampler.engine import Engine, SampleRequest
from roles.tasks.open import open_tasks
from roles.tasks.prompts import PromptBuilder
from roles.verifier.audit_agreement import STATISTICS, exceeded
from roles.verifier.audit_copies import Copies
from roles.verifier.audit_evidence import evidence_of
from roles.verifier.auditor import Recompute

MARGIN = 2.0
"""A limit is so many times the largest value of an honest group: other machines round otherwise."""
CONFIDENCE = 0.95
FACTOR_B = 0.01
"""Deviation of the random adapter's B; trained ones have about this after some hundred updates."""
LEAST = 1e-5
"""No limit is smaller: fp32 engines of the same kind may agree to the bit here and not elsewhere."""
BATCHES = (1, 2, 5)
"""Groups that decode together, in turn: shapes of batches change the order of sums."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured for one pair of engines."""

    engine: str
    """The sampler's."""
    tolerance: ToleranceSpec
    groups: int
    exceeded: int
    """Of the half that did not set the limits, and how many that half has: ``checked``."""
    checked: int


async def measure(
    spec: RunSpec, models: Path, *, sampler_dtype: str | None, groups: int, device: str, threads: int = 1
) -> Calibration:
    """Sample ``groups`` honest groups of the run's tasks and recompute them. Raises OperatorError."""
    from roles.sampler.transformers_engine import TransformersEngine
    from roles.verifier.torch_recompute import Recomputer

    model = await asyncio.to_thread(resolve_model, spec.model, models)
    tokenizer = load_tokenizer(model.directory)
    eos_ids = stop_token_ids(model.directory, tokenizer)
    chosen = only_device(choose_device(device), "verifier")
    builder = PromptBuilder(tokenizer, spec.tasks)
    rows = open_tasks(spec.tasks, spec.seed, Path.cwd()).train
    length = spec.sampling.max_new_tokens
    prompts = builder.select(
        rows[:groups], context_tokens=model.context_tokens, max_new_tokens=length
    ).prompts
    engine = await asyncio.to_thread(
        lambda: TransformersEngine.open(
            model.directory,
            spec.lora,
            eos_ids,
            device=chosen,
            dtype=sampler_dtype or spec.model.dtype,
            bits=spec.model.bits,
            rows_max=spec.sampling.group_size * max(BATCHES),
            groups_per_batch=max(BATCHES),
            threads=threads,
        )
    )
    try:
        factors = random_adapter(engine.shapes, spec.seed)
        await engine.load_policy("calibration", factors, newest=True)
        recompute = await asyncio.to_thread(
            Recomputer.open, model.directory, spec.model, spec.lora, eos_ids, chosen
        )
        tasks = [
            calibration_task(spec, prompts[number % len(prompts)].token_ids, number)
            for number in range(groups)
        ]
        sampled = await sample_groups(engine, tasks)
        found = await asyncio.to_thread(statistics_of, recompute, factors, tasks, sampled)
        return calibration(engine.name, found)
    finally:
        await engine.close()


def random_adapter(shapes: Factors, seed: int) -> Factors:
    """Factors of the shapes given, as after some training."""
    rng = np.random.default_rng(seed)
    factors: Factors = {}
    for name, shape in sorted(shapes.items()):
        size = FACTOR_B if ".lora_B." in name else shape.shape[1] ** -0.5
        factors[name] = (rng.normal(size=shape.shape) * size).astype(np.float32)
    return factors


def calibration_task(spec: RunSpec, prompt: Sequence[int], number: int) -> Task:
    """A task of the run's own settings, for measuring."""
    sampling = spec.sampling
    return Task(
        run=spec.name,
        group_id=f"calibration.{number}",
        row=0,
        prompt_token_ids=prompt,
        group_size=sampling.group_size,
        params=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_new_tokens=sampling.max_new_tokens,
        ),
        seed=(spec.seed << 20) + number,
        clock=GENESIS,
        deadline_s=3600.0,
    )


async def sample_groups(engine: Engine, tasks: Sequence[Task]) -> list[tuple[Rollout, ...]]:
    """Sample every task under the newest policy, in batches of ``BATCHES`` groups in turn."""
    sampled: list[tuple[Rollout, ...]] = []
    while len(sampled) < len(tasks):
        size = BATCHES[len(sampled) % len(BATCHES)]
        requests = [
            SampleRequest(t.prompt_token_ids, t.group_size, t.params, t.seed, None, t.deadline_s)
            for t in tasks[len(sampled) : len(sampled) + size]
        ]
        results = await asyncio.gather(*(engine.sample(request) for request in requests))
        sampled += [result.rollouts for result in results]
    return sampled


def statistics_of(
    recompute: Recompute, factors: Factors, tasks: Sequence[Task], sampled: Sequence[tuple[Rollout, ...]]
) -> list[dict[str, float]]:
    """Statistics of agreement of each group."""
    anything, rng = ToleranceSpec(seed=1.0), np.random.default_rng(0)
    found = []
    for task, rollouts in zip(tasks, sampled, strict=True):
        completions = [rollout.token_ids for rollout in rollouts]
        facts = recompute.facts("calibration", factors, task.prompt_token_ids, completions, task.params)
        numbers = evidence_of(task, rollouts, facts, anything, Copies(), rng).numbers
        found.append({name: numbers[name] for name in STATISTICS})
    return found


def calibration(engine: str, found: Sequence[dict[str, float]]) -> Calibration:
    """Limits from every other group, and how the groups between them fare."""
    setting, checking = found[::2], found[1::2]
    limits = {name: max(LEAST, MARGIN * max(one[name] for one in setting)) for name in STATISTICS}
    tolerance = ToleranceSpec.model_validate({name: _rounded_up(limits[name]) for name in STATISTICS})
    beyond = sum(bool(exceeded(one, tolerance)) for one in checking)
    bound = upper_bound(beyond, len(checking))
    tolerance = tolerance.model_copy(update={"flag_rate": _rounded_up(min(bound, 0.49))})
    return Calibration(engine, tolerance, len(found), beyond, len(checking))


def upper_bound(hits: int, trials: int) -> float:
    """Upper confidence bound on a rate of which ``hits`` in ``trials`` were seen (Clopper & Pearson 1934)."""
    low, high = hits / trials, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        log_rate, log_rest = math.log(max(rate, 1e-300)), math.log1p(-rate) if rate < 1 else -math.inf
        tail = sum(
            math.exp(
                math.lgamma(trials + 1)
                - math.lgamma(k + 1)
                - math.lgamma(trials - k + 1)
                + k * log_rate
                + ((trials - k) * log_rest if trials > k else 0.0)
            )
            for k in range(hits + 1)
        )
        low, high = (rate, high) if tail > 1 - CONFIDENCE else (low, rate)
    return high


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.3g}")


def tolerance_table(found: Calibration) -> str:
    """TOML for a run file."""
    limits = found.tolerance.model_dump()
    lines = [
        f"# {found.groups} honest groups. One half set these limits; of the other {found.checked} groups",
        f"# {found.exceeded} are beyond them: at most flag_rate of all are ({CONFIDENCE:.0%} confidence).",
        f'[audit.tolerances."{found.engine}"]',
        *(f"{name} = {limits[name]!r}" for name in (*STATISTICS, "flag_rate")),
    ]
    return "\n".join(lines) + "\n"
