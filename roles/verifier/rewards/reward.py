"""The reward port: what a reward function is given and what it answers.

"Could not score" is a value of its own (``Score.value`` None with a reason) and never zero: such a rollout
leaves its group's baseline instead of pulling it down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from protocol.reasons import Unscorable

NOTE_CHARS_MAX = 200
"""Notes travel in verdicts, which hold no more."""


@dataclass(frozen=True, slots=True)
class Item:
    """One completion to score. ``answer`` is the row's ground truth, which only verifiers hold."""

    completion: str
    answer: str | None
    prompt: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    conversation: Sequence[Mapping[str, Any]] = ()
    """In a run with turns: all of them, and the replies, as messages of the chat API; ``completion`` is the
    last."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward's finding: a finite ``value``, or None with the reason; ``note`` is for people."""

    value: float | None
    unscorable: Unscorable | None = None
    note: str = ""

    @classmethod
    def none(cls, reason: Unscorable, note: str = "") -> Score:
        """No value, because of ``reason``."""
        return cls(None, reason, note[:NOTE_CHARS_MAX])


@runtime_checkable
class Reward(Protocol):
    """One reward function."""

    async def score(self, item: Item) -> Score:
        """Score one completion. May raise: the caller turns that into ``REWARD_FAILED``."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """A reward that sees all completions of a group at once, such as one that compares them."""

    async def score_group(self, items: Sequence[Item]) -> list[Score]:
        """One score per item, in order; the items share prompt, answer and metadata. May raise."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A reward that is slow at first."""

    def prepare(self) -> None:
        """Do once, in the workers' template, what every worker would otherwise do again."""
        ...
