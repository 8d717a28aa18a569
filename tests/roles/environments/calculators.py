"""Turns and a tool: the sum of the numbers is hidden, and asking the calculator for it is worth something."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import verifiers.v1 as vf


class Hidden(vf.TaskData):
    numbers: tuple[int, int]


class Calculate(vf.Task[Hidden]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(sum(self.data.numbers)))

    @vf.reward(weight=0.5)
    async def asked_the_calculator(self, trace: vf.Trace) -> float:
        calls = [call for message in trace.assistant_messages for call in message.tool_calls or []]
        replies = [message.content for message in trace.tool_messages]
        wanted = {"a": self.data.numbers[0], "b": self.data.numbers[1]}
        good = [call for call in calls if call.name == "add" and json.loads(call.arguments) == wanted]
        return float(bool(good) and str(sum(self.data.numbers)) in replies)


class CalculatorsConfig(vf.TasksetConfig):
    below: int = 5


class Calculators(vf.Taskset[Calculate, CalculatorsConfig]):
    INFINITE = True

    def load(self) -> Iterator[Calculate]:
        below = self.config.below
        for i in itertools.count():
            numbers = (i % below, i // below % below)
            yield Calculate(Hidden(prompt=f"{numbers[0]}+{numbers[1]}", numbers=numbers), self.config.task)


__all__ = ["Calculators"]
