"""How soon is a lying sampler found, how often is an honest one, and what does an audit cost?

Each attack (``bench/lies``) sends a pool of real groups from the real engine, and the real recomputation
turns each into evidence, once. Trials then draw streams of groups from the pool and run the verifier's own
choice of groups and its own tests on them: of a newcomer, and of a sampler that was honest for
``HONEST_BEFORE`` groups. An attack can be told from noise if it changes tokens or log-probabilities of at
least half of its groups by more than honest engines differ; others are listed, but are no part of the goal.

    python -m bench.audit --json [--model DIR] [--dtype bfloat16] [--no-seeds] [--groups N]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from bench.harness import Figure, Goal, report, say
from bench.lies.attacks import attacks
from bench.lies.groups import Sent
from bench.lies.scene import Scene
from bench.lies.scenes import smollm2_scene, tiny_scene
from node.calibrate import calibration
from node.settings import read_environment
from protocol.audit_spec import AuditSpec, ToleranceSpec
from protocol.reasons import StructureFault
from roles.verifier.audit_agreement import STATISTICS
from roles.verifier.audit_stream import Chosen, Evidence, Stream, faults_of

RATE = 0.1
WITHIN = 50
TRIALS = 200
HONEST_BEFORE = 200
HONEST_SAMPLERS, HONEST_GROUPS = 1000, 1000
NEVER = 10**6
LONGEST = 200
"""Groups after which a trial gives up."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Evidence of one kind of sampler."""

    evidence: Sequence[Evidence]

    @property
    def refused(self) -> float:
        """Share of its groups that are refused by themselves when they are audited."""
        return float(np.mean([bool(faults_of(one)) for one in self.evidence]))


def found_after(
    pool: Pool, honest: Pool, spec: AuditSpec, rng: np.random.Generator, before: int, most: int
) -> tuple[int, int]:
    """Groups until a sampler is found (``NEVER`` if not within ``most``), and how many were audited.

    The sampler is honest for ``before`` groups.
    """
    stream = Stream("key", Chosen(rng.bytes(16), spec))
    for number in range(before + most):
        if not stream.wants():
            continue
        source = (honest if number < before else pool).evidence
        stream.add(source[int(rng.integers(len(source)))])
        if stream.guilty_of is not None:
            return number + 1 - before, stream.audited
    return NEVER, stream.audited


def quantiles(found: Sequence[int]) -> dict[str, Figure]:
    """How soon, over all trials."""
    times = np.array(found)
    cuts = {"p50": np.quantile(times, 0.5), "p99": np.quantile(times, 0.99)}
    return {name: None if value >= NEVER else float(value) for name, value in cuts.items()}


async def pools_of(
    scene: Scene, table: dict[str, Any], groups: int, tolerance: ToleranceSpec, rng: np.random.Generator
) -> dict[str, Pool]:
    """A pool for each attack that passes the structure checks."""
    pools = {}
    for name, make in table.items():
        if name == "completions truncated":
            continue
        sent = await make(scene, groups)
        pools[name] = Pool([scene.evidence(one, tolerance, rng) for one in sent])
        say(f"{name}: {pools[name].refused:.0%} of {groups} groups refused when audited")
    return pools


def honest_tolerance(scene: Scene, sent: Sequence[Sent], rng: np.random.Generator) -> ToleranceSpec:
    """As ``grpo-node calibrate`` measures it, under the adapter that is claimed."""
    anything = ToleranceSpec(seed=1.0)
    numbers = [scene.evidence(one, anything, rng).numbers for one in sent]
    return calibration("bench", [{k: one[k] for k in STATISTICS} for one in numbers]).tolerance


async def cost(scene: Scene, groups: int, dtype: str) -> dict[str, Figure]:
    """Seconds of generation and of auditing, for the same groups."""
    await scene.sample(2, dtype=dtype)
    began = time.perf_counter()
    sent = await scene.sample(groups, dtype=dtype)
    generated = time.perf_counter()
    for one in sent:
        scene.facts(one)
    audited = time.perf_counter()
    generation_s, audit_s = generated - began, audited - generated
    return {
        "generation_s_per_group": generation_s / groups,
        "audit_s_per_group": audit_s / groups,
        "audit_of_generation": audit_s / generation_s,
        "audit_of_generation_at_rate": RATE * audit_s / generation_s,
    }


async def measure(options: argparse.Namespace, place: Path) -> tuple[dict[str, Figure], list[Goal]]:
    """Everything."""
    rng = np.random.default_rng(0)
    say("loading, and training six updates")
    if options.model:
        scene, variants = await smollm2_scene(options.model, place, options.dtype)
    else:
        models = read_environment().places.models
        scene, variants = await tiny_scene(models, place, options.dtype)
    table = attacks(variants)
    honest = table.pop("honest")
    say("honest groups")
    tolerance = honest_tolerance(scene, await honest(scene, options.honest), rng)
    if options.no_seeds:
        tolerance = tolerance.model_copy(update={"seed": None})
    fresh = await honest(scene, options.honest)
    honest_pool = Pool([scene.evidence(one, tolerance, rng) for one in fresh])
    pools = await pools_of(scene, table, options.groups, tolerance, rng)
    figures: dict[str, Figure] = {f"tolerance/{k}": v for k, v in tolerance.model_dump().items()}
    figures |= await cost(scene, min(8, options.groups), options.dtype)
    spec = AuditSpec(rate=RATE)
    detection = {}
    for name, pool in pools.items():
        lying = {}
        for kind, before in (("newcomer", 0), ("established", HONEST_BEFORE)):
            found = [found_after(pool, honest_pool, spec, rng, before, LONGEST)[0] for _ in range(TRIALS)]
            lying[kind] = float(np.mean(np.array(found) <= WITHIN))
            figures |= {f"{name}/{kind}/{k}": v for k, v in quantiles(found).items()}
            figures[f"{name}/{kind}/within_{WITHIN}"] = lying[kind]
        figures[f"{name}/refused"] = pool.refused
        if pool.refused >= 0.5:  # noqa: PLR2004 see the head of this file
            detection[name] = min(lying.values())
    say(f"{HONEST_SAMPLERS} honest samplers over {HONEST_GROUPS} groups")
    trials = [
        found_after(honest_pool, honest_pool, spec, rng, 0, HONEST_GROUPS) for _ in range(HONEST_SAMPLERS)
    ]
    wrongly = float(np.mean([found <= HONEST_GROUPS for found, _ in trials]))
    audited = float(np.mean([count for _, count in trials])) / HONEST_GROUPS
    figures |= {
        "honest/refused": honest_pool.refused,
        "honest/quarantined": wrongly,
        "honest/audited_share": audited,
        "told_from_noise": len(detection),
        "attacks": len(pools) + 1,
        "completions truncated/refused": f"always: {StructureFault.LENGTH_WITHOUT_LIMIT.value}",
    }
    await scene.close()
    goals = [
        Goal("detection_min", min(detection.values()), at_least=0.99),
        Goal("honest_quarantined", wrongly, at_most=1e-3),
    ]
    return figures, goals


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder with SmolLM2-135M; default: the tiny model")
    parser.add_argument("--dtype", default="float32", help="of the samplers' engines; the verifier's is fp32")
    parser.add_argument("--groups", type=int, default=60, help="in the pool of each attack")
    parser.add_argument("--honest", type=int, default=300, help="honest groups, for the limits and again")
    parser.add_argument("--no-seeds", action="store_true", help="as for engines that do not use the seed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as place:
        figures, goals = asyncio.run(measure(options, Path(place)))
    report(figures, goals)


if __name__ == "__main__":
    main()
