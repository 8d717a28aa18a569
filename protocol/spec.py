"""What every class of settings is made of: closed models, bounded numbers, and faults told in one line."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import one_line
from protocol.limits import COUNT_MAX, NAME_MAX

Name = Annotated[str, Field(pattern=rf"^[a-z0-9][a-z0-9-]{{0,{NAME_MAX - 1}}}$")]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
CountOrZero = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]

_FAULTS_LISTED_MAX = 100
"""Faults that are spelled out; a stranger's frame may hold a hundred thousand."""


class Spec(BaseModel):
    """Frozen and closed: a typo in a run file is an error, not a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def first_fault(exc: ValidationError) -> str:
    """One line for a person: the first fault, and how many more there are."""
    if exc.error_count() > _FAULTS_LISTED_MAX:
        return f"{exc.error_count()} faults"
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(str(part) for part in errors[0]["loc"]) or "the file"
    what = errors[0]["msg"].removeprefix("Value error, ")
    if errors[0]["type"] == "extra_forbidden":
        what = "no such setting; check the spelling"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return one_line(f"{where}: {what}{more}")
