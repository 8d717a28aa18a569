"""Evaluation: held-out problems sampled under exactly one clock, beside the training.

Evaluation has queues of its own and is never trained on. Its tasks are pinned, so that the number
belongs to the policy it names, however long the answers take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from protocol.clock import VectorClock
from protocol.errors import BusError
from protocol.messages import SamplingParams, Task, VerifiedGroup
from protocol.ports import Delivery
from protocol.runspec import RunSpec
from protocol.subjects import Queue
from roles.ring import Ring, until
from roles.tasks.prompts import Prompt

EVAL_CREDIT = 64

LOST_LOOK_S = 5.0
"""How often an evaluation that waits is looked after: are its groups still somewhere?"""

_QUEUES = (Queue.EVAL_TASK, Queue.EVAL_ROLLOUT, Queue.EVAL_VERIFIED)
"""In the order in which a group passes them, so that none is missed between two counts."""


@dataclass
class Evaluation:
    """One evaluation in progress: scores by group until all have come."""

    clock: VectorClock
    version: float
    waiting: set[str]
    scores: list[float] = field(default_factory=list)
    unscorable: int = 0
    lost: int = 0
    """Groups that left the ring on the way: a dead letter says why."""
    issued: bool = False
    """All tasks are with the broker."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def reward(self) -> float:
        """Mean reward over all scored completions; NaN when there are none."""
        return fmean(self.scores) if self.scores else float("nan")


class Evaluator:
    """Issues evaluations and collects their verdicts."""

    def __init__(self, ring: Ring, prompts: Sequence[Prompt]) -> None:
        """``prompts`` are the rows of the held-out split that fit; the run's settings say how many count."""
        self._ring = ring
        self._problems = prompts[: ring.spec.eval.problems]
        self._running: dict[str, Evaluation] = {}
        self._begun, self._over = asyncio.Event(), asyncio.Event()
        self._over.set()

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._problems)

    @property
    def clocks(self) -> tuple[VectorClock, ...]:
        """What the evaluations in progress are pinned to."""
        return tuple({evaluation.clock: None for evaluation in self._running.values()})

    async def start(self, clock: VectorClock, version: float) -> Evaluation:
        """Issue one evaluation; its ``done`` event is set when no more verdicts will come."""
        tasks = eval_tasks(self._ring.spec, self._problems, clock)
        evaluation = Evaluation(clock, version, {task.group_id for task in tasks})
        self._running |= dict.fromkeys(evaluation.waiting, evaluation)
        self._over.clear()
        self._begun.set()
        await self._ring.send_all(Queue.EVAL_TASK, {f"eval:{task.group_id}": task for task in tasks})
        evaluation.issued = True
        return evaluation

    async def run(self) -> None:
        """Collect verdicts while an evaluation waits for them, for ever; cancel to stop.

        Only then: all learners share the queue, and who evaluates nothing must not take verdicts away.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_for_lost())
            while True:
                await self._begun.wait()
                consumer = await self._ring.consume(Queue.EVAL_VERIFIED, EVAL_CREDIT)
                try:
                    while (delivery := await until(self._over, consumer.next())) is not None:
                        await self._take_in(delivery)
                finally:
                    await consumer.close()

    async def _take_in(self, delivery: Delivery) -> None:
        received = await self._ring.receive(delivery, Queue.EVAL_VERIFIED, VerifiedGroup)
        if received is None:
            return
        verified, _ = received
        evaluation = self._running.pop(verified.group_id, None)
        if evaluation is not None:  # else one that an earlier process began, or a resend
            rewards = [verdict.reward for verdict in verified.verdicts]
            evaluation.scores += [reward for reward in rewards if reward is not None]
            evaluation.unscorable += rewards.count(None)
            evaluation.waiting.discard(verified.group_id)
        # Counted first: what has left the queues and was not counted is lost.
        await self._ring.settle(delivery)
        if evaluation is not None and not evaluation.waiting:
            await self._conclude(evaluation)

    async def _look_for_lost(self) -> None:
        """A group may end as a dead letter; an evaluation must not wait for it for ever."""
        while True:
            await self._begun.wait()
            await self._ring.clock.sleep(LOST_LOOK_S)
            waiting = [evaluation for evaluation in self._all_running() if evaluation.issued]
            try:
                depths = [await self._ring.bus.depth(queue) for queue in _QUEUES]
            except BusError as exc:
                self._ring.log.warning("evaluation_uncounted", error=str(exc) or type(exc).__name__)
                continue
            if sum(depth.total for depth in depths):
                continue
            for evaluation in waiting:
                if evaluation.waiting:
                    evaluation.lost = len(evaluation.waiting)
                    for group_id in evaluation.waiting:
                        self._running.pop(group_id, None)
                    await self._conclude(evaluation)

    def _all_running(self) -> list[Evaluation]:
        return list({id(evaluation): evaluation for evaluation in self._running.values()}.values())

    async def _conclude(self, evaluation: Evaluation) -> None:
        if not self._running:
            self._begun.clear()
            self._over.set()
        await self._ring.tell(
            "evaluated",
            clock=evaluation.clock.text,
            version=evaluation.version,
            reward=evaluation.reward,
            completions=len(evaluation.scores),
            unscorable=evaluation.unscorable,
            lost=evaluation.lost,
        )
        evaluation.done.set()  # last: whoever waits for it may end this loop


def eval_tasks(spec: RunSpec, problems: Sequence[Prompt], clock: VectorClock) -> list[Task]:
    """One pinned task per problem; the same seeds at every clock, so that curves compare."""
    params = SamplingParams(temperature=spec.eval.temperature, max_new_tokens=spec.sampling.max_new_tokens)
    return [
        Task(
            run=spec.name,
            group_id=f"eval-{clock.digest}.{prompt.row}",
            split="held_out",
            row=prompt.row,
            prompt_token_ids=prompt.token_ids,
            told=prompt.told,
            group_size=spec.eval.completions_per_problem,
            params=params,
            seed=spec.seed * 1_000_003 + prompt.row,
            clock=clock,
            pinned=True,
            deadline_s=spec.sampling.deadline_s,
        )
        for prompt in problems
    ]
