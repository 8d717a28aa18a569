"""A run of several learners, all roles real, under virtual time; durations are given, results are computed.

learners ─ tasks ─▶ samplers (more than enough of them) ─▶ verifier ─▶ learners ─▶ bucket and heads
                                                                                       │
                                                      the watch: composed policy ─▶ exam
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from bench.emulation.engine import EmulatedEngine
from bench.emulation.exam import Exam
from bench.emulation.site import (
    CountedPolicy,
    QuietRing,
    SharedBucket,
    StepOffload,
    TimedStore,
    Told,
    in_line,
)
from node.entry_cache import EntryCache
from node.memory_broker import MemoryBroker
from node.memory_bus import MemoryBus
from node.models import Detokenizer, LocalModel, load_tokenizer, resolve_model, stop_token_ids
from node.node import Node, Part
from node.presence import Presence
from node.virtual_time import VirtualClock
from protocol.clock import VectorClock
from protocol.identity import Identity
from protocol.ports import AdapterStore
from protocol.runspec import RunSpec
from roles.learner.learner import Learner
from roles.learner.torch_adapter import open_adapter
from roles.policy.policies import Policies
from roles.ring import Ring, cancelled
from roles.sampler.sampler import Sampler
from roles.sampler.transformers_model import ServedModel
from roles.tasks.open import open_tasks
from roles.tasks.prompts import Prompt, PromptBuilder
from roles.tasks.taskset import TaskSet
from roles.verifier.checks import Rules
from roles.verifier.rewards.scorer import Scorer
from roles.verifier.verifier import Verifier

CPU = torch.device("cpu")
SAMPLERS = 2
"""Sampler nodes; their lanes grow with the learners. More nodes would only compose the same policies."""


@dataclass(frozen=True, slots=True)
class Durations:
    """What things take, in virtual seconds."""

    step_s: float = 1.0
    step_spread: float = 0.1
    """Steps take up to this share more or less, so that learners do not march in step."""
    batch_s: float = 1.0
    transfer_s: float = 0.05
    begin_s: float = 0.5
    """When learners begin: by then all of them are present."""


@dataclass(frozen=True, slots=True)
class Point:
    """What the watch saw."""

    at_s: float
    """Since the learners began."""
    groups: int
    """Trained and committed, by all learners."""
    version: float
    reward: float
    """Of the newest composed policy, on held-out problems."""


@dataclass(repr=False)
class Ground:
    """What does not depend on the rules of a run: model, task set and prompts."""

    model: LocalModel
    tasks: TaskSet
    prompts: PromptBuilder
    train: tuple[Prompt, ...]
    eos_ids: frozenset[int]
    decoder: Detokenizer
    exam: Exam

    @classmethod
    def lay(cls, spec: RunSpec, models: Path, problems: int) -> Ground:
        """Load everything once; ``problems`` held-out rows are examined."""
        model = resolve_model(spec.model, models)
        tokenizer = load_tokenizer(model.directory)
        tasks = open_tasks(spec.tasks, spec.seed, Path.cwd())
        prompts = PromptBuilder(tokenizer, spec.tasks)
        eos = stop_token_ids(model.directory, tokenizer)
        limits = {"context_tokens": model.context_tokens, "max_new_tokens": spec.sampling.max_new_tokens}
        return cls(
            model,
            tasks,
            prompts,
            tuple(prompts.select(tasks.train, **limits).prompts),
            frozenset(eos),
            Detokenizer(tokenizer),
            Exam(model.directory, spec, tokenizer, tasks.held_out[:problems], eos[0]),
        )


@dataclass(repr=False)
class Swarm:
    """One run. Make it inside a simulation."""

    spec: RunSpec
    ground: Ground
    learners: int
    late_s: float
    """How much later than others a learner can read its peers' updates."""
    lanes: int
    """Batches that all samplers together decode at a time."""
    groups_per_batch: int
    durations: Durations
    directory: Path
    told: Told = field(default_factory=Told)
    lags: list[float] = field(default_factory=list)
    """Updates of a peer that a learner's newest policy lacked, at each look."""

    def __post_init__(self) -> None:
        self._clock = VirtualClock()
        self._broker = MemoryBroker(self._clock)
        self._bucket = SharedBucket(EntryCache(self.directory))
        self._learners: dict[str, Learner] = {}
        self.dropped: dict[str, int] = {}
        """Groups that were consumed without training, by reason."""

    async def run(self, seconds: float, every_s: float) -> list[Point]:
        """Run for ``seconds`` after the learners began, looking every ``every_s``."""
        await MemoryBus(self._broker, self.spec.name, node="creator").create_run(self.spec)
        never = asyncio.Event()
        nodes = [*self._all_learners(), *self._all_samplers(), self._verifier()]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(node.run(never)) for node in nodes]
            points = await self._watch(seconds, every_s)
            await cancelled(*running)
        return points

    async def _watch(self, seconds: float, every_s: float) -> list[Point]:
        policies = Policies(self._ring("watch", "watch"), self._store(), in_line)
        await policies.start()
        points: list[Point] = []
        for number in range(round(seconds / every_s) + 1):
            due = self.durations.begin_s + number * every_s
            await self._clock.sleep(due - self._clock.monotonic())
            newest = await policies.read_heads()
            policy = await policies.at(newest)
            groups = sum(head.groups_trained for head in policies.heads.values())
            reward = self.ground.exam.reward(policy.factors)
            points.append(Point(number * every_s, groups, policy.version, reward))
            self._note_lags(newest)
        dropped: Counter[str] = Counter()
        for head in policies.heads.values():
            dropped.update(head.groups_dropped)
        self.dropped = dict(dropped)
        return points

    def _note_lags(self, newest: VectorClock) -> None:
        for name, learner in self._learners.items():
            self.lags += [count - learner.clock[peer] for peer, count in newest if peer != name]

    def _all_learners(self) -> list[Node]:
        return [self._learner(f"learner-{number + 1}") for number in range(self.learners)]

    def _all_samplers(self) -> list[Node]:
        spec, ground = self.spec, self.ground
        served = ServedModel.load(ground.model.directory, spec.lora, device="cpu", dtype=spec.model.dtype)
        return [self._sampler(f"sampler-{number + 1}", served) for number in range(SAMPLERS)]

    def _learner(self, name: str) -> Node:
        policy = CountedPolicy([self._adapter()], self.spec, self._clock.monotonic)
        ring = self._ring(name, "learner")
        others = f"{self.spec.name}/updates/"
        own = f"{others}{name}/"
        store = self._store(
            lambda path: self.late_s if path.startswith(others) and not path.startswith(own) else 0.0
        )
        learner = Learner(
            ring,
            store,
            policy,
            offload=StepOffload(policy, self._clock, self._step_times(name)),
            aside=in_line,
            train=self.ground.train,
            held_out=(),
        )
        self._learners[name] = learner

        async def begin(stop: asyncio.Event) -> None:
            await self._clock.sleep(self.durations.begin_s)
            await learner.run(stop)

        return self._node(name, "learner", begin, lambda: learner.clock)

    def _step_times(self, name: str) -> Iterator[float]:
        """What this learner's steps take, one after the other."""
        rng, durations = random.Random(f"{self.spec.seed}/{name}"), self.durations
        while True:
            yield durations.step_s * (1 + durations.step_spread * rng.uniform(-1, 1))

    def _adapter(self) -> PeftModel:
        return open_adapter(self.ground.model.directory, self.spec.model, self.spec.lora, CPU)

    def _sampler(self, name: str, served: ServedModel) -> Node:
        engine = EmulatedEngine(
            served,
            self.ground.eos_ids,
            self._clock,
            lanes=self.lanes // SAMPLERS,
            groups_per_batch=self.groups_per_batch,
            batch_s=self.durations.batch_s,
            rows=self.spec.sampling.group_size,
        )
        sampler = Sampler(self._ring(name, "sampler"), self._store(), engine, in_line)
        return self._node(name, "sampler", sampler.run, lambda: sampler.clock)

    def _verifier(self) -> Node:
        ground = self.ground
        rules = Rules(
            ground.eos_ids,
            ground.model.vocab_size,
            ground.tasks,
            lambda row: ground.prompts.token_ids(row.prompt).tolist(),
        )
        ring = self._ring("verifier-1", "verifier")
        verifier = Verifier(ring, rules, ground.decoder, Scorer(self.spec.rewards))
        return self._node("verifier-1", "verifier", verifier.run, VectorClock)

    def _node(
        self,
        name: str,
        role: str,
        run: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
        clock: Callable[[], VectorClock],
    ) -> Node:
        ring = self._ring(name, "node")
        return Node(ring, Presence(ring, (role,), {}), [Part(role, run, clock, lambda: 0, _nothing)])

    def _ring(self, name: str, role: str) -> Ring:
        numbers = itertools.count()
        bus = MemoryBus(self._broker, self.spec.name, node=name)
        identity = Identity.deterministic(name)
        ring = QuietRing(bus, identity, self.spec, role, self._clock, lambda: f"{name}-{next(numbers)}")
        ring.told = self.told
        return ring

    def _store(self, late_s: Callable[[str], float] = lambda _path: 0.0) -> AdapterStore:
        return TimedStore(self._bucket, self._clock, self.durations.transfer_s, late_s)


async def _nothing() -> None:
    """There is nothing to close."""
