"""What do two lying samplers in three do to a run, and what is left of that with audits?

One process, real roles on a broker in memory: learner, verifier, an honest sampler and two liars, on the
tiny model. The liars sample at temperature 2 and report each token as improbable, so that wrong answers get
ratios in the thousands. Three arms: all three honest, two liars without audits, two liars with audits. The
reward is the success rate of the final policy on held-out problems, sampled by an engine of the bench's own.
Goals: audited, the liars cost no more than honest runs differ by their seeds; not audited, they cost more.

    python -m bench.liars --json [--updates N] [--seeds N]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import structlog

from bench.harness import Figure, Goal, report, say
from node.demo import demo_spec
from node.entry_cache import EntryCache
from node.memory_broker import MemoryBroker
from node.memory_bus import MemoryBus
from node.memory_store import MemoryBucket, MemoryStore
from node.models import LocalModel, load_tokenizer, resolve_model, stop_token_ids
from node.node import Node, Part
from node.presence import Presence
from node.runtime import ThreadOffload, flatten
from node.settings import NodeSettings, Places, read_environment
from node.system_clock import SystemClock
from node.wiring import Ground, build_learner, build_sampler, build_verifier
from protocol.clock import GENESIS
from protocol.codec import decode_as, readable
from protocol.errors import OperatorError
from protocol.identity import Identity
from protocol.messages import DeadLetter, Rollout, SamplingParams, Standing
from protocol.runspec import RunSpec
from protocol.subjects import STANDINGS, Bucket
from roles.policy.compose import Factors
from roles.policy.policies import Policies
from roles.ring import Ring
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.sampler import Sampler
from roles.sampler.transformers_engine import TransformersEngine
from roles.tasks.open import open_tasks
from roles.tasks.prompts import PromptBuilder

TOLERANCES = {"transformers-*": {"median": 1e-4, "p90": 1e-4, "largest": 1e-3, "bias": 1e-4, "seed": 1e-4}}
PROBLEMS, COMPLETIONS = 256, 4
EXAM_NOISE = 0.03
"""Two standard errors of an exam's success rate: no smaller difference is one."""
LIES_AT = 2.0
"""Temperature."""
REPORTED = -8.0
"""Log-probability of every token, whatever it was."""


class LyingEngine:
    """Implements ``Engine``: samples otherwise than it is asked, and makes up the log-probabilities."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self.name = engine.name
        self.groups_max = engine.groups_max
        self.load_policy = engine.load_policy
        self.unload_policy = engine.unload_policy
        self.abandon = engine.abandon
        self.conclude = engine.conclude
        self.close = engine.close

    async def sample(self, request: SampleRequest) -> Sampled:
        """Lie."""
        params = request.params.model_copy(update={"temperature": LIES_AT})
        sampled = await self._engine.sample(
            SampleRequest(
                request.prompt_token_ids,
                request.count,
                params,
                request.seed,
                request.policy,
                request.deadline_s,
            )
        )
        made_up = tuple(
            Rollout(
                index=r.index,
                token_ids=r.token_ids,
                sampler_logprobs=np.full(len(r.token_ids), REPORTED, np.float32),
                finish=r.finish,
            )
            for r in sampled.rollouts
        )
        return Sampled(sampled.policy, made_up, sampled.generation_s)


class Run:
    """One run on a broker in memory."""

    def __init__(self, spec: RunSpec, model: LocalModel, places: Places, place: Path) -> None:
        self.spec, self._model, self._places, self._place = spec, model, places, place
        self._clock = SystemClock()
        self._broker = MemoryBroker(self._clock)
        self._broker.create(spec, 10_000)
        self._bucket = MemoryBucket()

    def ground(self, node: str, role: str) -> Ground:
        """What a node stands on."""
        bus = MemoryBus(self._broker, self.spec.name, node=node)
        identity = Identity.generate(node)
        settings = NodeSettings(
            run=self.spec.name,
            roles=(role,),  # type: ignore[arg-type]
            broker="memory",
            name=node,
            device="cpu",
            threads=1,
            places=self._places,
        )
        store = MemoryStore(self._bucket, EntryCache(self._place / node), self._clock)
        ring = Ring(bus, identity, self.spec, "node", self._clock)
        presence = Presence(ring, (role,), {})
        return Ground(settings, identity, bus, self.spec, store, self._model, presence, self._place / node)

    async def play(self, node: str, role: str, *, lies: bool = False) -> None:
        """Be a node until the run is finished; a liar that is thrown out is gone."""
        ground = self.ground(node, role)
        builders: dict[str, Any] = {
            "learner": build_learner,
            "sampler": build_liar if lies else build_sampler,
            "verifier": build_verifier,
        }
        part = await builders[role](ground)
        try:
            await Node(ground.ring("node"), ground.presence, [part]).run(asyncio.Event())
        except* OperatorError as group:
            say(f"{node}: {flatten(group)[0]}")

    async def whole(self, liars: int) -> None:
        """Learner, verifier, three samplers."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.play("learner-1", "learner"))
            group.create_task(self.play("verifier-1", "verifier"))
            for number in range(3):
                lies = number >= 3 - liars
                group.create_task(self.play(f"sampler-{number + 1}", "sampler", lies=lies))

    async def policies(self) -> tuple[Factors, Factors]:
        """What the run began with, and what it came to."""
        ground = self.ground("examiner", "learner")
        offload = ThreadOffload("examiner")
        policies = Policies(ground.ring("examiner"), ground.store, offload)
        await policies.start()
        first = await policies.at(GENESIS)
        last = await policies.at(await policies.read_heads())
        await offload.close()
        return first.factors, last.factors

    def books(self) -> tuple[Counter[str], list[Standing]]:
        """Dead letters by reason, and judgements."""
        run = self._broker.run(self.spec.name)
        letters = Counter(letter.reason.value for letter in readable(run.dead, DeadLetter))
        entries = run.buckets[Bucket.RUN].below(STANDINGS)
        return letters, [decode_as(entry.value, Standing) for entry in entries.values()]


async def build_liar(ground: Ground) -> Part:
    """A sampler with a lying engine, and all else as it should be."""
    tokenizer = load_tokenizer(ground.model.directory)
    engine = LyingEngine(
        open_engine(ground.model, ground.spec, stop_token_ids(ground.model.directory, tokenizer))
    )
    offload = ThreadOffload("liar")
    sampler = Sampler(ground.ring("sampler"), ground.store, engine, offload, drain_s=1.0)

    async def close() -> None:
        await engine.close()
        await offload.close()

    return Part("sampler", sampler.run, lambda: sampler.clock, lambda: sampler.busy, close)


def open_engine(model: LocalModel, spec: RunSpec, eos_ids: tuple[int, ...]) -> TransformersEngine:
    """An engine as nodes have it."""
    return TransformersEngine.open(
        model.directory,
        spec.lora,
        eos_ids,
        device="cpu",
        dtype="float32",
        rows_max=128,
        groups_per_batch=None,
        threads=1,
    )


async def exam(model: LocalModel, spec: RunSpec, factors: Factors) -> float:
    """Success rate of a policy on held-out problems."""
    tokenizer = load_tokenizer(model.directory)
    tasks = open_tasks(spec.tasks, spec.seed, Path())
    builder = PromptBuilder(tokenizer, spec.tasks)
    engine = open_engine(model, spec, stop_token_ids(model.directory, tokenizer))
    await engine.load_policy("final", factors, newest=True)
    params = SamplingParams(max_new_tokens=spec.sampling.max_new_tokens)
    rows = tasks.held_out[:PROBLEMS]
    requests = [
        SampleRequest(builder.token_ids(row.prompt), COMPLETIONS, params, number, None, 600.0)
        for number, row in enumerate(rows)
    ]
    results = await asyncio.gather(*(engine.sample(request) for request in requests))
    await engine.close()
    right = [
        str(tokenizer.decode(r.token_ids.tolist(), skip_special_tokens=True)).strip() == row.answer
        for row, result in zip(rows, results, strict=True)
        for r in result.rollouts
    ]
    return float(np.mean(right))


async def arm(seed: int, updates: int, *, liars: int, rate: float, places: Places) -> dict[str, Figure]:
    """One run from start to end."""
    with tempfile.TemporaryDirectory() as place:
        spec = demo_spec(0, updates, Path(place)).model_dump()
        spec |= {"seed": seed, "audit": {"rate": rate, "grace_s": 5.0, "tolerances": TOLERANCES}}
        spec["eval"] |= {"every": 0, "problems": 0}
        run_spec = RunSpec.model_validate(spec)
        model = resolve_model(run_spec.model, places.models)
        run = Run(run_spec, model, places, Path(place))
        began = time.perf_counter()
        await run.whole(liars)
        seconds = time.perf_counter() - began
        letters, standings = run.books()
        first, last = await run.policies()
        return {
            "reward_before": await exam(model, run_spec, first),
            "reward": await exam(model, run_spec, last),
            "wall_s": seconds,
            "quarantined": sum(one.judgement.value == "quarantined" for one in standings),
            "refused": letters["audit_failed"] + letters["quarantined"],
        }


def goals_of(rewards: Mapping[str, Sequence[float]]) -> tuple[dict[str, Figure], list[Goal]]:
    """Means of the arms, and what they differ by beside what honest runs differ by."""
    means = {name: fmean(values) for name, values in rewards.items()}
    honest = rewards["honest"]
    spread = max(honest) - min(honest)
    figures: dict[str, Figure] = {f"{name}/reward": value for name, value in means.items()}
    figures["honest/spread"] = spread
    allowed = max(spread, EXAM_NOISE)
    with_audits, without = (means["honest"] - means[name] for name in ("liars, audited", "liars"))
    return figures, [
        Goal("reward_lost_with_audits", with_audits, at_most=allowed),
        Goal("reward_lost_without_audits", without, at_least=allowed),
    ]


def main() -> None:
    """Three arms, each with every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    places = read_environment().places
    figures: dict[str, Figure] = {}
    rewards: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        for name, liars, rate in (("honest", 0, 0.0), ("liars", 2, 0.0), ("liars, audited", 2, 0.1)):
            found = asyncio.run(arm(seed, options.updates, liars=liars, rate=rate, places=places))
            say(f"{name}, seed {seed}: {found}")
            figures |= {f"{name}/seed {seed}/{key}": value for key, value in found.items()}
            rewards.setdefault(name, []).append(float(found["reward"] or 0))
    means, goals = goals_of(rewards)
    report(figures | means, goals)


if __name__ == "__main__":
    main()
