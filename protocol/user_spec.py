"""A simulated user who speaks between the model's turns, as the run's file names it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from protocol.spec import Count, Positive, Spec
from protocol.tools_spec import Function

PROMPT = "prompt"
"""What the user's function finds a row's prompt by."""

Column = Annotated[str, Field(min_length=1, max_length=200)]


class UserSpec(Spec):
    """``[user]``: a turn that calls no tool is answered by a function (docs/environments.md).

    Samplers run it, so it is told a row's prompt and the columns named here, never the answer.
    """

    function: Function
    """``module:function`` of the messages so far and the row. A sampler imports a module only if its own
    command line allows it."""
    messages_max: Annotated[int, Field(ge=1, le=63)] = 4
    """What the user says at most in one rollout, after the prompt. ``tools.turns_max`` bounds it too."""
    timeout_s: Positive = 5.0
    """Of one message."""
    memory_bytes_max: Count = 1 << 30
    reply_chars_max: Count = 4096
    """A longer message is cut, and says so."""
    columns: Annotated[tuple[Column, ...], Field(strict=False, max_length=64)] = ()
    """Further columns of the task set that the function is told, and so everybody in the run. A row that
    lacks one is skipped."""

    @field_validator("columns")
    @classmethod
    def _are_further_columns(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        if PROMPT in columns:
            raise ValueError("the prompt is told anyway: leave it out")
        if len(set(columns)) != len(columns):
            raise ValueError("each column may be listed once")
        return columns
