"""The task-set port: numbered rows of prompts and answers, split into train and held-out.

Every peer that opens the same TasksSpec gets the same rows in the same order (``digest`` proves it).
Samplers never open one: prompts reach them as token ids inside tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Row:
    """One problem. ``origin`` says where it came from (``file.jsonl line 7``)."""

    prompt: str
    answer: str
    origin: str
    metadata: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    """This problem's own, instead of the run's."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that was not used, and why."""

    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Rows after shuffling and splitting, and the rows that were skipped on the way."""

    train: Sequence[Row]
    held_out: Sequence[Row]
    skipped: Sequence[Skipped]
    digest: str

    def row(self, split: Split, index: int) -> Row | None:
        """The row, or None if there is no such row."""
        rows = self.train if split == "train" else self.held_out
        return rows[index] if 0 <= index < len(rows) else None
