"""What every message is: frozen, closed, and equal to another by its content."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """Frozen and closed. ``==`` compares arrays by their bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    def __eq__(self, other: object) -> bool:
        """Equality by content, arrays included."""
        return type(self) is type(other) and _comparable(self) == _comparable(other)

    def __hash__(self) -> int:
        """Hash by content, arrays included."""
        return hash((type(self), _comparable(self)))


def _comparable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return tuple(_comparable(getattr(value, name)) for name in type(value).model_fields)
    if isinstance(value, dict):
        return frozenset(value.items())
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tobytes())
    if isinstance(value, tuple):
        return tuple(_comparable(item) for item in value)
    return value
