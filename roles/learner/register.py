"""The learner's register: its own cumulative update, and the policy it trains at (pure numpy).

    update_i[n] = update_i[n-1] + weight * (factors now - factors at the last publish or merge)
    policy      = genesis + sum of all learners' updates, own included

Counts never decrease, and weights are baked in when an update is published, never applied later.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from protocol.clock import VectorClock
from roles.policy.compose import Factors, compose, factors_digest, version_of


@dataclass(frozen=True, slots=True)
class Published:
    """One more update of this learner, and the policy that contains it."""

    update: Factors
    clock: VectorClock
    own_weight: float
    """Summed weights of this learner's updates."""
    version: float
    """Summed weights of all updates in the policy."""
    policy: Factors
    digest: str


class Register:
    """Where this learner stands: genesis, its own update, its peers' updates, and their sum."""

    def __init__(self, learner: str, genesis: Factors) -> None:
        """Start at genesis."""
        self._learner = learner
        self._genesis = genesis
        self._own: Factors = {name: np.zeros_like(tensor) for name, tensor in genesis.items()}
        self._peers: dict[str, tuple[int, float, Factors]] = {}
        self.count = 0
        self.own_weight = 0.0
        self.base = compose(genesis, {})
        """The composed policy from which unpublished progress is measured."""

    @property
    def clock(self) -> VectorClock:
        """Clock of ``base``."""
        peers = {learner: count for learner, (count, _, _) in self._peers.items()}
        return VectorClock.of({**peers, self._learner: self.count})

    @property
    def version(self) -> float:
        """Summed weights of all updates in ``base``."""
        return version_of([self.own_weight, *(weight for _, weight, _ in self._peers.values())])

    def copy(self) -> Register:
        """A register that goes its own way. The tensors are shared: none is ever changed in place."""
        twin = copy.copy(self)
        twin._peers = dict(self._peers)  # noqa: SLF001 its own class
        return twin

    def resume(self, update: Factors, count: int, own_weight: float) -> None:
        """Continue from this learner's own last published update."""
        self._own, self.count, self.own_weight = update, count, own_weight
        self.base = self._compose(update)

    def publish(self, factors: Factors, weight: float) -> Published:
        """Turn progress since ``base`` into the next update, and move ``base`` onto it.

        The learner must go on from ``policy``: it differs from ``factors`` by fp32 rounding, and only
        it is what every peer composes.
        """
        scale = np.float32(weight)
        self._own = {name: own + scale * (factors[name] - self.base[name]) for name, own in self._own.items()}
        self.count += 1
        self.own_weight += weight
        self.base = self._compose(self._own)
        digest = factors_digest(self.base)
        return Published(self._own, self.clock, self.own_weight, self.version, self.base, digest)

    def merge(self, learner: str, update: Factors, count: int, weight: float, factors: Factors) -> Factors:
        """Take in a peer's newer update; returns ``factors`` with unpublished progress kept.

        Raises ValueError if that would roll the peer's count back.
        """
        if count < self._peers.get(learner, (0, 0.0, {}))[0]:
            raise ValueError(f"the count of {learner} never decreases")
        before = self.base
        self._peers[learner] = (count, weight, update)
        self.base = self._compose(self._own)
        return {name: self.base[name] + (factors[name] - before[name]) for name in self.base}

    def _compose(self, own: Factors) -> Factors:
        updates = {learner: update for learner, (_, _, update) in self._peers.items()}
        if self.count:
            updates[self._learner] = own
        return compose(self._genesis, updates)
