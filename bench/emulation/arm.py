"""An arm of the campaign: the rules under which learners share a run, and what one run under them gives."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import structlog
import torch

from bench.emulation.swarm import Durations, Ground, Point, Swarm
from node.demo import demo_spec
from node.settings import read_environment
from node.virtual_time import simulate
from protocol.runspec import RunSpec

PROBLEMS = 256
"""Held-out problems of the exam."""
EVERY_S = 2.5
"""Virtual seconds between two exams."""
ENDLESS = 1_000_000
WINDOW = 0.1
"""A level is the mean over this last share of an axis: between two steps the reward goes up and down."""
DURATIONS = Durations()


@dataclass(frozen=True, slots=True)
class Arm:
    """Rules. The defaults are one learner with the demo's settings, half its batch and a constant rate."""

    name: str
    learners: int = 1
    weight: float | None = None
    """Of an update; None is one over the number of learners."""
    publish_every: int = 1
    causal: bool = True
    late: float = 0.0
    """Publish intervals after which a learner can read its peers' updates."""
    rate: float = 1.0
    """Times the demo's learning rate."""
    batch: int = 1
    """Times the groups of a step, which takes no longer: learners that share every gradient."""
    max_staleness: int = 4
    groups_per_update: int = 8

    def spec(self, seed: int) -> RunSpec:
        """The demo's run under these rules."""
        run: dict[str, Any] = json.loads(demo_spec(seed, ENDLESS, Path("store")).model_dump_json())
        run["learner"] |= {
            "groups_per_update": self.groups_per_update * self.batch,
            "publish_every": self.publish_every,
            "update_weight": self.weight,
            "learning_rate": self.rate * run["learner"]["learning_rate"],
            "schedule": "constant",
            "state_every": ENDLESS,
        }
        run["staleness"] |= {"max_staleness": self.max_staleness, "causal": self.causal}
        run["eval"] |= {"every": 0, "problems": 0}
        return RunSpec.model_validate_json(json.dumps(run))


@dataclass(frozen=True, slots=True)
class Result:
    """One arm with one seed: a line of the results file."""

    arm: dict[str, Any]
    seed: int
    updates: int
    """Steps that one learner has time for."""
    curve: list[tuple[float, int, float, float]]
    """Virtual seconds, groups trained, version, reward."""
    steps: int
    dropped: dict[str, int]
    rolled_back: int
    staleness: float
    """Mean age of what was trained, in versions."""
    lag: float
    """Mean number of a peer's updates that a learner's newest policy lacked."""
    cost_s: float = 0.0
    """Processor seconds."""

    def is_of(self, arm: Arm, seed: int, updates: int) -> bool:
        """Whether this result is that of a run that was asked for."""
        return (self.arm, self.seed, self.updates) == (asdict(arm), seed, updates)


def run_arm(arm: Arm, seed: int, updates: int, problems: int = PROBLEMS) -> Result:
    """One run, on one thread; the same arguments give the same curve."""
    began = time.process_time()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    spec = arm.spec(seed)
    ground = Ground.lay(spec, read_environment().places.models, problems)
    seconds = updates * DURATIONS.step_s

    async def emulate(directory: Path) -> tuple[Swarm, list[Point]]:
        swarm = Swarm(
            spec,
            ground,
            arm.learners,
            arm.late * arm.publish_every * DURATIONS.step_s,
            2 * arm.learners * arm.batch,
            arm.groups_per_update,
            DURATIONS,
            directory,
        )
        return swarm, await swarm.run(seconds, min(EVERY_S, seconds))

    with tempfile.TemporaryDirectory() as directory:
        swarm, points = simulate(lambda: emulate(Path(directory)), limit_s=10 * seconds + 100)
    told = swarm.told
    ages = [age for step in told.steps if isinstance(age := step["sample/staleness_mean"], float)]
    return Result(
        asdict(arm),
        seed,
        updates,
        [(p.at_s, p.groups, round(p.version, 6), p.reward) for p in points],
        len(told.steps),
        swarm.dropped,
        told.events["step_rolled_back"],
        fmean(ages) if ages else 0.0,
        fmean(swarm.lags) if swarm.lags else 0.0,
        round(time.process_time() - began, 1),
    )


def level_at(result: Result, axis: int, end: float) -> float:
    """The reward at ``end`` of an axis of the curve (0 seconds, 1 groups); NaN if it does not get there."""
    columns = list(zip(*result.curve, strict=True))
    if columns[axis][-1] < end:
        return float("nan")
    places = np.linspace((1 - WINDOW) * end, end, 11)
    return float(np.interp(places, columns[axis], columns[3]).mean())


def reached(result: Result, axis: int, reward: float) -> float:
    """Where on an axis the reward is first reached; infinite if never."""
    return next((float(point[axis]) for point in result.curve if point[3] >= reward), float("inf"))


def largest_dip(result: Result) -> float:
    """How far the reward ever fell below what it had been."""
    rewards = [point[3] for point in result.curve]
    best = np.maximum.accumulate(rewards)
    return float((best - rewards).max())


def groups_of_one(arm: dict[str, Any], updates: int) -> float:
    """Groups that every arm is compared at: nine tenths of what one learner has time for."""
    return 0.9 * float(arm["groups_per_update"]) * updates


def mean_over(results: Sequence[Result], figure: Callable[[Result], float]) -> tuple[float, float]:
    """Mean and standard deviation of a figure over the seeds."""
    values = [figure(result) for result in results]
    known = bool(np.isfinite(values).all())
    return float(np.mean(values)), float(np.std(values)) if known else 0.0
