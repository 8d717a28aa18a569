"""What happened in a simulation, as lines for a person: the same lines whenever the seed is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from node.virtual_time import VirtualClock

DULL = frozenset({"group_sampled", "group_verified", "role_started", "role_stopped"})
"""Events that say only that all is well."""

KEPT = {"step_trained": ("version", "sample/staleness_max", "batch/groups_per_step", "updated")}
"""Fields of events that have too many."""


class Trace:
    """Lines of ``seconds  peer  what  fields``."""

    def __init__(self, *, keep: bool = True) -> None:
        """Without ``keep`` nothing is written, which is faster."""
        self.lines: list[str] = []
        self._keep = keep
        self._clock = VirtualClock()

    def add(self, who: str, what: str, **fields: object) -> None:
        """One line, now."""
        if self._keep:
            told = " ".join(f"{key}={_told(value)}" for key, value in fields.items())
            self.lines.append(f"{self._clock.monotonic():9.3f}  {who:<11} {what:<24} {told}".rstrip())

    def teller(self, who: str) -> Callable[..., None]:
        """``add`` for one peer."""

        def tell(what: str, **fields: object) -> None:
            self.add(who, what, **fields)

        return tell

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take in what the roles log; or keep them quiet."""
        level = logging.INFO if self._keep else logging.CRITICAL
        structlog.configure(
            processors=[self._take],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.reset_defaults()

    def _take(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
        name, who = str(event.pop("event")), str(event.pop("node", "broker"))
        event.pop("role", None)
        if name not in DULL:
            kept = KEPT.get(name, tuple(event))
            self.add(who, name, **{key: event[key] for key in kept if key in event})
        raise structlog.DropEvent


def _told(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
