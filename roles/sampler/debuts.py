"""Debuts: how soon after it was loaded the first token was sampled under each policy (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from roles.policy.policies import PolicyVersion
from roles.sampler.engine import Sampled

AWAITED_MAX = 32
"""Policies whose first group may still come; whoever loads faster than that never samples under most."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A policy under which nothing was sampled yet."""

    version: float
    clock: str
    at: float


class Debuts:
    """One sampler's policies from loading to their first token."""

    def __init__(self) -> None:
        """Nothing is loaded."""
        self._awaited: dict[str, _Loaded] = {}

    def loaded(self, policy: PolicyVersion, at: float) -> None:
        """``policy`` is the newest from ``at`` on."""
        self._awaited[policy.name] = _Loaded(policy.version, policy.clock.text, at)
        while len(self._awaited) > AWAITED_MAX:
            del self._awaited[next(iter(self._awaited))]

    def take(self, sampled: Sampled, now: float) -> dict[str, float | str] | None:
        """What to tell of a policy whose first group has just become whole; None if it is no debut, or if
        the engine cannot tell when it sampled a first token.

        ``start_s``: from loading to the start of that group; ``first_token_s``: from there to its first
        token.
        """
        if sampled.first_token_s is None or sampled.policy not in self._awaited:
            return None
        loaded = self._awaited.pop(sampled.policy)
        return {
            "version": loaded.version,
            "clock": loaded.clock,
            "start_s": max(0.0, now - sampled.generation_s - loaded.at),
            "first_token_s": sampled.first_token_s,
        }
