"""A stage for the verifier's loop: a broker in memory, one verifier, and a hand that feeds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from node.memory_broker import MemoryBroker
from node.memory_bus import MemoryBus
from node.system_clock import SystemClock
from protocol.codec import decode, encode
from protocol.errors import BackPressure
from protocol.messages import DeadLetter, Event, RolloutGroup, Task, VerifiedGroup
from protocol.subjects import Queue
from roles.ring import Ring
from roles.tasks.taskset import Row, TaskSet
from roles.verifier.checks import Rules
from roles.verifier.rewards.reward import Item
from roles.verifier.rewards.scorer import Scored, Scorer
from roles.verifier.verifier import Verifier
from tests.build import RUN, a_group, a_rollout, a_runspec, an_identity

ROWS = [Row("sort 5 4", "45", "row 0"), Row("sort 1", "", "tasks.jsonl line 2")]
RULES = Rules(frozenset({2}), 20, TaskSet(ROWS, ROWS[:1], [], "d"))
PATIENCE_S = 5.0


class Digits:
    """Tokens 4 and 5 are digits, token 2 is special."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(str(token) for token in token_ids if token != 2)


class HeldScorer:
    """Holds items whose completion is ``held`` until it is told to go on."""

    def __init__(self, held: str = "45") -> None:
        self.held = held
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()

    async def score(self, items: Sequence[Item]) -> list[Scored]:
        if items[0].completion == self.held:
            self.began.set()
            await self.go_on.wait()
        return [Scored(1.0, {"exact": 1.0}) for _ in items]


class FullBus(MemoryBus):
    """The first publications to a queue of verified groups meet back-pressure."""

    refusals = 2

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        if queue is Queue.VERIFIED and self.refusals:
            self.refusals -= 1
            raise BackPressure("full")
        await super().publish(queue, data, message_id)


class Stage:
    """A broker with one run, one verifier on it, and a hand that puts groups in and takes them out."""

    def __init__(self, make_bus: Callable[..., MemoryBus] = MemoryBus, ack_wait_s: float = 30.0) -> None:
        self.broker = MemoryBroker(SystemClock())
        sampling = {"max_new_tokens": 5, "ack_wait_s": ack_wait_s}
        self.spec = a_runspec(sampling=sampling, rewards=[{"name": "exact", "weight": 2.0}])
        self.hand = MemoryBus(self.broker, RUN, node="hand")
        self.bus = make_bus(self.broker, RUN, node="verifier-1")
        self.stop = asyncio.Event()

    @contextlib.asynccontextmanager
    async def verifier(self, scorer: Any = None, **arguments: Any) -> AsyncIterator[Verifier]:
        await self.hand.create_run(self.spec)
        ring = Ring(self.bus, an_identity("verifier-1"), self.spec, "verifier", SystemClock())
        verifier = Verifier(ring, RULES, Digits(), scorer or Scorer(self.spec.rewards), **arguments)
        running = asyncio.create_task(verifier.run(self.stop))
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield verifier
                self.stop.set()
                await running
        finally:
            running.cancel()

    async def put(self, group: RolloutGroup, queue: Queue = Queue.ROLLOUT, message_id: str = "") -> None:
        frame = encode(group, an_identity(group.sampler))
        await self.hand.publish(queue, frame, message_id or group.group_id)

    async def out(self, queue: Queue = Queue.VERIFIED) -> VerifiedGroup:
        consumer = await self.hand.consume(queue, 1)
        delivery = await consumer.next()
        await delivery.ack()
        await consumer.close()
        return decode(delivery.data).expect(VerifiedGroup)

    async def event(self, name: str) -> Event:
        async for frame in self.hand.events(replay=True):
            event = decode(frame).expect(Event)
            if event.name == name:
                return event
        raise AssertionError("events never end")

    async def letter(self) -> DeadLetter:
        """The dead letter of the one group that was put in."""
        async for frame in self.hand.events(replay=True):
            if decode(frame).expect(Event).name in {"group_rejected", "group_verified"}:
                break
        (frame,) = await self.hand.dead_letters()
        return decode(frame).expect(DeadLetter)


def wrong_and_right(task: Task | None = None) -> RolloutGroup:
    """Completions ``45`` and ``54``."""
    return a_group(task, rollouts=(a_rollout(), a_rollout(index=1, token_ids=[5, 4, 2])))
