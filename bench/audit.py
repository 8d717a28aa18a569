"""How soon is a lying sampler found, how often is an honest one, and what does an audit cost?

Each attack (``bench/lies``) sends a pool of real groups from the real engine, and the real recomputation
turns each into evidence, once. Trials then draw streams of groups from the pool and run the verifier's own
choice of groups and its own tests on them: of a newcomer, and of a sampler that was honest for
``HONEST_BEFORE`` groups. An attack can be told from noise if it changes tokens or log-probabilities of at
least half of its groups by more than honest engines differ; others are listed, but are no part of the goal.
Shares come with their 95 % intervals (Wilson), as ``…/low`` and ``…/high``.

    python -m bench.audit --json [--model DIR] [--dtype bfloat16] [--no-seeds] [--groups N] [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from bench.harness import Figure, Goal, report, say
from bench.lies.attacks import attacks
from bench.lies.groups import Sent
from bench.lies.scene import Scene
from bench.lies.scenes import smollm2_scene, tiny_scene
from bench.lies.trials import NEVER, Found, Pool, found_after, possible, wilson
from node.calibrate import calibration
from node.settings import read_environment
from protocol.audit_spec import AuditSpec, ToleranceSpec
from protocol.reasons import StructureFault
from roles.verifier.audit_agreement import STATISTICS

RATE = 0.1
WITHIN = 50
HONEST_BEFORE = 200
HONEST_GROUPS = 1000
"""Of each honest sampler."""
LONGEST = 200
"""Groups after which a trial gives up."""
ROLLOUTS = (8, 16, 32, 64, 128, 256)
"""Audited rollouts after which the share of liars that were found is told."""
HONEST_ROLLOUTS = (64, 256, 1024, 4096)
TOLD = 0.5
"""Share of an attack's groups that must be beyond honest noise if the attack is to be found."""
SPEC = AuditSpec(rate=RATE)


def share(name: str, hits: int, trials: int) -> dict[str, Figure]:
    """A share and its interval."""
    low, high = wilson(hits, trials)
    return {name: hits / trials, f"{name}/low": low, f"{name}/high": high}


def told_of(found: Sequence[Found], group_size: int) -> dict[str, Figure]:
    """How soon liars were found, over all trials: by groups, and by rollouts that were audited."""
    groups = np.array([one.groups for one in found])
    rollouts = np.array([one.audited * group_size if one.groups < NEVER else NEVER for one in found])
    figures = share(f"within_{WITHIN}", int((groups <= WITHIN).sum()), len(found))
    for name, times in (("groups", groups), ("rollouts", rollouts)):
        for label, cut in (("p50", 0.5), ("p99", 0.99)):
            value = float(np.quantile(times, cut, method="higher"))
            figures[f"{name}_{label}"] = None if value >= NEVER else value
    return figures | {f"by_rollouts_{count}": float((rollouts <= count).mean()) for count in ROLLOUTS}


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


def detections(
    pools: dict[str, Pool], honest: Pool, trials: int, group_size: int, rng: np.random.Generator
) -> tuple[dict[str, Figure], Goal]:
    """Trials of every attack, and the one that is found least among those that can be told from noise."""
    figures: dict[str, Figure] = {}
    least: tuple[float, str] = (1.0, "none")
    told = 0
    for name, pool in pools.items():
        figures[f"{name}/refused"] = pool.refused
        figures[f"{name}/possible"] = possible(pool.refused, SPEC, WITHIN)
        for kind, before in (("newcomer", 0), ("established", HONEST_BEFORE)):
            found = [found_after(pool, honest, SPEC, rng, before=before, most=LONGEST) for _ in range(trials)]
            figures |= {f"{name}/{kind}/{k}": v for k, v in told_of(found, group_size).items()}
            within = sum(one.groups <= WITHIN for one in found) / trials
            if pool.refused >= TOLD and within <= least[0]:
                least = within, f"{name}/{kind}"
        told += pool.refused >= TOLD
    worst = share("detection_min", round(least[0] * trials), trials)
    figures |= worst | {"detection_min/attack": least[1], "told_from_noise": told, "attacks": len(pools) + 1}
    return figures, Goal("detection_min", least[0], at_least=0.99)


def quarantines(
    honest: Pool, streams: int, group_size: int, rng: np.random.Generator
) -> tuple[dict[str, Figure], Goal]:
    """Honest samplers, each over ``HONEST_GROUPS`` groups."""
    say(f"{streams} honest samplers over {HONEST_GROUPS} groups")
    trials = [found_after(honest, honest, SPEC, rng, before=0, most=HONEST_GROUPS) for _ in range(streams)]
    judged = [one for one in trials if one.groups < NEVER]
    figures = share("honest/quarantined", len(judged), streams)
    for count in HONEST_ROLLOUTS:
        figures[f"honest/quarantined/by_rollouts_{count}"] = (
            sum(one.audited * group_size <= count for one in judged) / streams
        )
    audited = sum(one.audited for one in trials) / (streams * HONEST_GROUPS)
    figures |= {"honest/refused": honest.refused, "honest/audited_share": audited}
    return figures, Goal("honest_quarantined", len(judged) / streams, at_most=1e-3)


async def measure(options: argparse.Namespace, place: Path) -> tuple[dict[str, Figure], list[Goal]]:
    """Everything."""
    rng = np.random.default_rng(options.seed)
    say("loading, and training six updates")
    if options.model:
        scene, variants = await smollm2_scene(options.model, place, options.dtype, options.seed)
    else:
        models = read_environment().places.models
        scene, variants = await tiny_scene(models, place, options.dtype, options.seed)
    table = attacks(variants)
    honest = table.pop("honest")
    say(f"{options.calibrate} honest groups for the limits, {options.honest} to be judged")
    tolerance = honest_tolerance(scene, await honest(scene, options.calibrate), rng)
    if options.no_seeds:
        tolerance = tolerance.model_copy(update={"seed": None})
    fresh = await honest(scene, options.honest)
    honest_pool = Pool([scene.evidence(one, tolerance, rng) for one in fresh])
    pools = await pools_of(scene, table, options.groups, tolerance, rng)
    figures: dict[str, Figure] = {f"tolerance/{k}": v for k, v in tolerance.model_dump().items()}
    figures |= await cost(scene, min(8, options.groups), options.dtype)
    await scene.close()
    size = scene.spec.sampling.group_size
    say(f"{options.trials} trials of each attack")
    found, detection_min = detections(pools, honest_pool, options.trials, size, rng)
    left_alone, honest_quarantined = quarantines(honest_pool, options.streams, size, rng)
    figures |= found | left_alone
    figures["completions truncated/refused"] = f"always: {StructureFault.LENGTH_WITHOUT_LIMIT.value}"
    return figures, [detection_min, honest_quarantined]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder with SmolLM2-135M; default: the tiny model")
    parser.add_argument("--dtype", default="float32", help="of the samplers' engines; the verifier's is fp32")
    parser.add_argument("--groups", type=int, default=200, help="in the pool of each attack")
    parser.add_argument("--calibrate", type=int, default=300, help="honest groups that set the limits")
    parser.add_argument("--honest", type=int, default=3000, help="honest groups in the pool to be judged")
    parser.add_argument("--trials", type=int, default=1000, help="of each attack")
    parser.add_argument("--streams", type=int, default=10_000, help="honest samplers")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other groups and trials")
    parser.add_argument("--no-seeds", action="store_true", help="as for engines that do not use the seed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as place:
        figures, goals = asyncio.run(measure(options, Path(place)))
    report(figures, goals)


if __name__ == "__main__":
    main()
