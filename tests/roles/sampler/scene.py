"""A running sampler on a FakeEngine: what it was given, what it holds, and what it passed on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from protocol.codec import decode_as, encode
from protocol.messages import RolloutGroup, SamplingParams
from protocol.ports import QueueDepth
from protocol.runspec import RunSpec
from protocol.subjects import Queue
from roles.learner.fake_policy import SHAPES
from roles.policy.compose import Factors
from roles.sampler.fake_engine import FakeEngine
from roles.sampler.sampler import Sampler
from roles.sampler.turns import Conversations
from tests.build import a_runspec, a_task, an_identity
from tests.ground import FaultyBus, Ground

TOKEN_S = 1.0
LONG = 40
"""Tokens of a group that takes long; no EOS ends it early."""


class ListingEngine(FakeEngine):
    """A FakeEngine that tells which policies it holds."""

    @property
    def resident(self) -> set[str]:
        return set(self._residents._policies)


class LateLoads(ListingEngine):
    """Loading the newest policy takes a second."""

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        await self._clock.sleep(1.0)
        await super().load_policy(name, factors, newest=newest)


class Scene:
    """A running sampler."""

    def __init__(
        self,
        ground: Ground,
        genesis: Factors,
        drain_s: float = 30.0,
        engine_type: type[ListingEngine] = ListingEngine,
        conversations: Conversations | None = None,
        **engine: Any,
    ) -> None:
        self.ground, self.genesis = ground, genesis
        self.bus: FaultyBus = ground.bus("sampler-1")
        shapes = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        settings: dict[str, Any] = {"eos_ids": (), "seconds_per_token": TOKEN_S} | engine
        self.engine = engine_type(shapes, ground.clock, **settings)
        ring = ground.ring("sampler-1", self.bus, "sampler")
        self.sampler = Sampler(ring, ground.store(), self.engine, ground.offload, drain_s, conversations)
        self.stop = asyncio.Event()
        self.work = asyncio.create_task(self.sampler.run(self.stop))

    @classmethod
    async def at(cls, directory: Path, spec: RunSpec | None = None, **settings: Any) -> Scene:
        ground = Ground(directory, spec or a_run())
        scene = cls(ground, await ground.claim_genesis(), **settings)
        await scene.pass_time()
        return scene

    async def task(
        self, number: int = 0, *, tokens: int = 2, queue: Queue = Queue.TASK, **changes: Any
    ) -> None:
        params = SamplingParams(max_new_tokens=tokens)
        task = a_task(**({"group_id": f"learner-1.{number}", "params": params} | changes))
        await self.ground.bus().publish(queue, encode(task, an_identity()), f"task:{task.group_id}")

    async def commit(self, count: int) -> None:
        await self.ground.commit_update(self.genesis, count)

    async def pass_time(self, seconds: float = 0.2) -> None:
        await self.ground.clock.sleep(seconds)

    def groups(self, queue: Queue = Queue.ROLLOUT) -> dict[str, RolloutGroup]:
        """What it passed on, by group id."""
        groups = [decode_as(message.data, RolloutGroup) for message in self.ground.run.queues[queue]._waiting]
        return {group.group_id: group for group in groups}

    @property
    def tasks(self) -> QueueDepth:
        return self.ground.run.queues[Queue.TASK].depth()

    async def drain(self) -> None:
        self.stop.set()
        await self.work


def a_run(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {"sampling": {"group_size": 2, "max_new_tokens": LONG, "ack_wait_s": 3.0}}
    return a_runspec(**(fields | changes))
