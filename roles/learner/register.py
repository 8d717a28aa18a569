"""The learner's register: its own cumulative update, and the policy it trains at (pure numpy).

    update_i[n] = update_i[n-1] + weight * (factors now - factors at the last publish or merge)
    policy      = genesis + sum of all learners' updates, own included

Counts never decrease, and weights are baked in when an update is published, never applied later.

Where the run stores updates as bfloat16, an update is rounded when it is published, and what the rounding
took (the *residual*) is part of the progress that the next one publishes (error feedback: Seide et al.
2014). The learner trains on the rounded sum, for that is what every peer composes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.clock import VectorClock
from protocol.learner_spec import LearnerSpec, UpdateDtype
from roles.policy.bfloat16 import rounded
from roles.policy.compose import Factors, compose, composed, factors_digest, fault, version_of
from roles.policy.norm_bound import UNRECORDED, Step, norm_at_one, squared

DEFAULTS = LearnerSpec()


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
    step_norm: float
    """Norm of this update's step at weight 1; not finite if a number is not."""
    dtype: UpdateDtype
    """How the update is stored; it is rounded accordingly."""

    @property
    def step(self) -> Step:
        """What the manifest records of its step."""
        return Step(self.step_norm, self.version)

    @property
    def digest(self) -> str:
        """Of ``policy``. Hashed when it is asked for: the next step does not wait for that."""
        return factors_digest(self.policy)


@dataclass(frozen=True, slots=True)
class _Peer:
    """A peer's newest merged update."""

    count: int
    weight: float
    step: Step
    update: Factors


class Register:
    """Where this learner stands: genesis, its own update, its peers' updates, and their sum."""

    def __init__(self, learner: str, genesis: Factors, settings: LearnerSpec = DEFAULTS) -> None:
        """Start at genesis; ``settings`` say how updates are stored."""
        self._learner = learner
        self._genesis = genesis
        self._dtype: UpdateDtype = settings.update_dtype
        self._own: Factors = {name: np.zeros_like(tensor) for name, tensor in genesis.items()}
        self._residual: Factors = {}
        self._peers: dict[str, _Peer] = {}
        self.settings = settings
        self.count = 0
        self.own_weight = 0.0
        self.base = compose(genesis, {})
        """The composed policy from which unpublished progress is measured."""

    @property
    def clock(self) -> VectorClock:
        """Clock of ``base``."""
        peers = {learner: peer.count for learner, peer in self._peers.items()}
        return VectorClock.of({**peers, self._learner: self.count})

    @property
    def version(self) -> float:
        """Summed weights of all updates in ``base``."""
        return version_of([self.own_weight, *(peer.weight for peer in self._peers.values())])

    @property
    def peers_steps(self) -> list[Step]:
        """What the peers' merged updates record of their steps."""
        return [peer.step for peer in self._peers.values()]

    @property
    def residual(self) -> Factors:
        """What rounding took from the last published update; empty if it took nothing."""
        return self._residual

    @residual.setter
    def residual(self, residual: Factors) -> None:
        """Go on with a saved one, after ``resume``. Raises ValueError if it is of other factors."""
        if residual and (why := fault(residual, self._genesis)):
            raise ValueError(f"not a residual of this run: {why}")
        self._residual = residual if self._dtype == "bfloat16" else {}

    def copy(self) -> Register:
        """A register that goes its own way. The tensors are shared: none is ever changed in place."""
        twin = copy.copy(self)
        twin._peers = dict(self._peers)  # noqa: SLF001 its own class
        return twin

    def resume(self, update: Factors, count: int, own_weight: float) -> None:
        """Continue from this learner's own last published update, without any residual."""
        self._own, self.count, self.own_weight = update, count, own_weight
        self._residual = {}
        self.base = self._compose(update)

    def publish(self, factors: Factors, weight: float) -> Published:
        """Turn progress since ``base`` into the next update, and move ``base`` onto it.

        The learner must go on from ``policy``: it differs from ``factors`` by rounding, and only it is what
        every peer composes. Nothing is judged here: ``norm_bound.out_of_proportion`` does.
        """
        self.count += 1
        self.own_weight += weight
        scale, own, base, residual, squares = np.float32(weight), {}, {}, {}, []
        with np.errstate(over="ignore", invalid="ignore"):  # a step that is not finite is told by its norm
            for name, before in self._own.items():  # one after the other, while the processor's cache has it
                progress = scale * (factors[name] - self.base[name])
                own[name] = before + (progress + self._residual[name] if self._residual else progress)
                if self._dtype == "bfloat16":
                    wanted, own[name] = own[name], rounded(own[name])
                    residual[name] = wanted - own[name]
                base[name] = composed(self._genesis[name], self._changes(name, own[name]))
                squares.append(squared(own[name] - before))
        self._own, self.base, self._residual = own, base, residual
        return Published(
            update=self._own,
            clock=self.clock,
            own_weight=self.own_weight,
            version=self.version,
            policy=self.base,
            step_norm=norm_at_one(squares, weight),
            dtype=self._dtype,
        )

    def merge(
        self,
        learner: str,
        update: Factors,
        count: int,
        weight: float,
        factors: Factors,
        step: Step = UNRECORDED,
    ) -> Factors:
        """Take in a peer's newer update, which records ``step``; returns ``factors`` with unpublished
        progress kept.

        Raises ValueError if that would roll the peer's count back.
        """
        if learner in self._peers and count < self._peers[learner].count:
            raise ValueError(f"the count of {learner} never decreases")
        before = self.base
        self._peers[learner] = _Peer(count, weight, step, update)
        self.base = self._compose(self._own)
        return {name: self.base[name] + (factors[name] - before[name]) for name in self.base}

    def _compose(self, own: Factors) -> Factors:
        return {
            name: composed(tensor, self._changes(name, own[name])) for name, tensor in self._genesis.items()
        }

    def _changes(self, name: str, own: NDArray[Any]) -> list[NDArray[Any]]:
        """What all learners' updates change of one factor, in the order in which ``compose`` adds them."""
        changes = {learner: peer.update[name] for learner, peer in self._peers.items()}
        if self.count:
            changes[self._learner] = own
        return [changes[learner] for learner in sorted(changes)]
