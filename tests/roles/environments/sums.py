"""One turn: an answer to say, and two rewards of different weight."""

from __future__ import annotations

from collections.abc import Sequence

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / len(trace.last_reply)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Sequence[SumTask]:
        prompts = [f"What is {i} + {i}?" for i in range(5)]
        return [
            SumTask(SumData(idx=i, prompt=prompt, system_prompt="Be short.", answer=2 * i), self.config.task)
            for i, prompt in enumerate(prompts)
        ]


__all__ = ["Sums"]
