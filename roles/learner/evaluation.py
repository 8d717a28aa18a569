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
from protocol.messages import SamplingParams, Task, VerifiedGroup
from protocol.ports import Delivery
from protocol.runspec import RunSpec
from protocol.subjects import Queue
from roles.ring import Ring
from roles.tasks.prompts import Prompt

EVAL_CREDIT = 64


@dataclass
class Evaluation:
    """One evaluation in progress: scores by group until all have come."""

    clock: VectorClock
    version: float
    waiting: set[str]
    scores: list[float] = field(default_factory=list)
    unscorable: int = 0
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

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._problems)

    async def start(self, clock: VectorClock, version: float) -> Evaluation:
        """Issue one evaluation; its ``done`` event is set when every verdict has come."""
        tasks = eval_tasks(self._ring.spec, self._problems, clock)
        evaluation = Evaluation(clock, version, {task.group_id for task in tasks})
        self._running |= dict.fromkeys(evaluation.waiting, evaluation)
        for task in tasks:
            await self._ring.send(Queue.EVAL_TASK, task, f"eval:{task.group_id}")
        return evaluation

    async def run(self) -> None:
        """Collect verdicts for ever; cancel to stop."""
        consumer = await self._ring.consume(Queue.EVAL_VERIFIED, EVAL_CREDIT)
        try:
            while True:
                await self._take_in(await consumer.next())
        finally:
            await consumer.close()

    async def _take_in(self, delivery: Delivery) -> None:
        received = await self._ring.receive(delivery, Queue.EVAL_VERIFIED, VerifiedGroup)
        if received is None:
            return
        verified, _ = received
        await self._ring.settle(delivery)
        evaluation = self._running.pop(verified.group_id, None)
        if evaluation is None:
            return  # an evaluation that an earlier process of this learner began, or a resend
        rewards = [verdict.reward for verdict in verified.verdicts]
        evaluation.scores += [reward for reward in rewards if reward is not None]
        evaluation.unscorable += rewards.count(None)
        evaluation.waiting.discard(verified.group_id)
        if not evaluation.waiting:
            evaluation.done.set()
            await self._ring.tell(
                "evaluated",
                clock=evaluation.clock.text,
                version=evaluation.version,
                reward=evaluation.reward,
                completions=len(evaluation.scores),
                unscorable=evaluation.unscorable,
            )


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
            group_size=spec.eval.completions_per_problem,
            params=params,
            seed=spec.seed * 1_000_003 + prompt.row,
            clock=clock,
            pinned=True,
            deadline_s=spec.sampling.deadline_s,
        )
        for prompt in problems
    ]
