"""The ``[learner]`` table of a run: how updates are made, and how they are published."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from protocol.limits import BATCH_WRITES_MAX
from protocol.spec import Count, CountOrZero, NonNegative, Positive, Spec

UpdateDtype = Literal["float32", "bfloat16"]

_GROUPS_MAX = BATCH_WRITES_MAX - 1  # of one commit; the head is its last write


class PublishingSpec(Spec):
    """How updates are published."""

    publish_every: Count = 1
    """Steps between two updates. Publishing waits behind the steps, so more than 1 only saves uploads."""
    export_every: CountOrZero = 50
    """Updates between PEFT exports; 0 means only at the end."""
    state_every: Count = 10
    """Updates between saved optimizer states, from which a restarted learner resumes."""
    update_weight: Positive | None = None
    """Weight of this run's updates; absent means one over the number of live learners."""
    update_dtype: UpdateDtype = "float32"
    """How updates are stored. ``bfloat16`` halves them; the rounding error goes into the next update."""
    step_norm_max: NonNegative = 10.0
    """An update is refused whose step exceeds so many times the median of its peers'; 0 means never."""


class LearnerSpec(PublishingSpec):
    """How updates are made and published."""

    updates: Count = 500
    groups_per_update: Count = 16
    learning_rate: Positive = 4e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: CountOrZero = 0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: NonNegative = 0.0
    grad_norm_max: Positive = 1.0
    micro_batch_tokens: Count = 8192
    """Token budget of one forward pass; changes memory and speed, never the result."""
    gradient_checkpointing: bool = False
    """Run each layer again for its gradient: less memory, more time (docs/adr/0013), the same result."""

    @model_validator(mode="after")
    def _fits_a_commit(self) -> Self:
        if self.groups_per_update * self.publish_every > _GROUPS_MAX:
            raise ValueError(f"groups_per_update * publish_every is at most {_GROUPS_MAX}: one atomic commit")
        return self
