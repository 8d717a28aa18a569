"""Takes arguments: how many tasks, of what, and what a right answer is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf
from pydantic import BaseModel, Field


class Range(BaseModel, extra="forbid"):
    start: int = 0
    steps: list[int] = [1]


class Worth(vf.TaskConfig):
    right: float = 1.0


class PowersConfig(vf.TasksetConfig):
    task: Worth = Worth()
    exponent: Literal[2, 3] = 2
    examples: int = Field(default=4, ge=1)
    bases: Range = Range()
    system_prompt: Path | None = None


class Power(vf.TaskData):
    answer: int


class PowerTask(vf.Task[Power, vf.State, Worth]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.config.right) if trace.last_reply == str(self.data.answer) else 0.0


class Powers(vf.Taskset[PowerTask, PowersConfig]):
    def load(self) -> Sequence[PowerTask]:
        step = sum(self.config.bases.steps)
        bases = [self.config.bases.start + step * i for i in range(self.config.examples)]
        return [
            PowerTask(
                Power(prompt=f"{base}^{self.config.exponent}", answer=base**self.config.exponent),
                self.config.task,
            )
            for base in bases
        ]


__all__ = ["Powers"]
