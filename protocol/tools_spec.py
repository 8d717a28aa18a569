"""Tools that the model may call between its turns, as the run's file names them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from protocol.spec import Count, Positive, Spec

Function = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$", max_length=200)]


class ToolsSpec(Spec):
    """``[tools]``: rollouts become conversations (docs/environments.md).

    Samplers run the functions, so nothing that they need may be the answer, which stays with verifiers.
    """

    functions: Annotated[tuple[Function, ...], Field(strict=False, min_length=1, max_length=64)]
    """``module:function``. A sampler imports a module only if its own command line allows it."""
    turns_max: Annotated[int, Field(ge=2, le=64)] = 8
    """Turns of the policy in one rollout. ``sampling.max_new_tokens`` bounds all of them and the replies."""
    timeout_s: Positive = 5.0
    """Of one call."""
    memory_bytes_max: Count = 1 << 30
    reply_chars_max: Count = 4096
    """A longer reply is cut, and says so."""
    schemas: str | None = None
    """What the model is told of the functions, as ``create`` found it (JSON). A sampler whose functions say
    otherwise does not join."""
