"""What one seed brings: the run, who plays in it, how likely small faults are, and when the large ones come.

Everything follows from the seed and is decided before the first message is sent.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from node.memory_store import StoreFault
from protocol.runspec import RunSpec
from tests.sim.swarm import a_small_run

STORM_S = 40.0
"""Large faults begin within so long."""
WRONG_CLOCK_S = 6 * 3600.0
SKEW = 0.01


class Kind(StrEnum):
    """The large faults."""

    CRASH = "crash"
    """Kill -9, and a new process with the same identity some time later."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT some time later."""
    REPLACE = "replace"
    """Frozen, taken for dead and replaced by a new process with the same identity; then it thaws."""
    CUT_BROKER = "cut_broker"
    CUT_STORE = "cut_store"
    CUT_BOTH = "cut_both"
    JOIN = "join"
    """One more peer of a role."""
    LEAVE = "leave"
    """SIGTERM, and a new process some time later."""
    RESTART_BROKER = "restart_broker"
    """Kill -9 of the broker, which comes back on its disk."""
    LOSE_DISK = "lose_disk"
    """The broker comes back without its disk; some time later an operator types ``grpo-node recover``."""
    STORE_OUTAGE = "store_outage"
    REDELIVER = "redeliver"
    """The broker hands messages out again although their takers are alive."""


EVERYBODY = frozenset({Kind.RESTART_BROKER, Kind.LOSE_DISK, Kind.STORE_OUTAGE, Kind.REDELIVER})
"""Large faults that are nobody's in particular."""


@dataclass(frozen=True)
class Incident:
    """One large fault. ``who`` is a peer's name, a role for those that join, or empty."""

    at: float
    kind: Kind
    who: str
    for_s: float


@dataclass(frozen=True)
class Odds:
    """How likely each small fault is, per request, message or call."""

    latency_s: float = 0.005
    lost_request: float = 0.0
    lost_answer: float = 0.0
    breaks: float = 0.0
    """Of a loss: that the connection breaks with it."""
    late: float = 0.0
    lost_word: float = 0.0
    """Of what expects no answer: signs of life, releases, telemetry."""
    lost_news: float = 0.0
    late_news: float = 0.0
    store: float = 0.0
    store_faults: tuple[StoreFault, ...] = ()


CALM = Odds()


@dataclass(frozen=True)
class Machine:
    """How wrong one machine's clocks are."""

    rate: float
    ahead_s: float


@dataclass(frozen=True)
class Plan:
    """One seed."""

    seed: int
    spec: RunSpec
    peers: dict[str, str]
    """Roles of those that are there from the beginning, by name."""
    odds: Odds
    incidents: tuple[Incident, ...]

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Everything that follows from ``seed``."""
        dice = random.Random(seed)
        peers = {f"learner-{n + 1}": "learner" for n in range(dice.choice([1, 1, 2, 2, 3]))}
        peers |= {f"sampler-{n + 1}": "sampler" for n in range(dice.choice([1, 2, 3]))}
        peers |= {f"verifier-{n + 1}": "verifier" for n in range(dice.choice([1, 2]))}
        return cls(seed, _spec(dice, seed), peers, _odds(dice), _incidents(dice, list(peers)))

    @property
    def text(self) -> str:
        """One line for a person."""
        learner, staleness = self.spec.learner, self.spec.staleness
        roles = list(self.peers.values())
        counts = " ".join(f"{role}s={roles.count(role)}" for role in ("learner", "sampler", "verifier"))
        return (
            f"{counts} updates={learner.updates} groups_per_update={learner.groups_per_update} "
            f"publish_every={learner.publish_every} max_staleness={staleness.max_staleness} "
            f"incidents={len(self.incidents)}"
        )


def _spec(dice: random.Random, seed: int) -> RunSpec:
    changes: dict[str, dict[str, Any]] = {
        "sampling": {
            "group_size": dice.choice([2, 3]),
            "ack_wait_s": dice.choice([2.0, 3.0, 5.0]),
            "deliveries_max": dice.choice([3, 5, 8]),
        },
        "learner": {
            "updates": dice.choice([4, 5, 6]),
            "groups_per_update": dice.choice([2, 3]),
            "publish_every": dice.choice([1, 1, 1, 2, 3]),
            "state_every": dice.choice([1, 2, 3]),
            "export_every": dice.choice([0, 3]),
        },
        "staleness": {"max_staleness": dice.choice([0, 1, 2, 4])},
        "eval": {"every": dice.choice([0, 0, 2]), "problems": dice.choice([0, 2])},
        "store": {
            "keep_updates": dice.choice([1, 2, 8]),
            "keep_states": dice.choice([1, 2]),
            "grace_s": dice.choice([2.0, 10.0, 3600.0]),
        },
    }
    return a_small_run(seed, **changes)


def machine_of(seed: int, name: str) -> Machine:
    """The machine that a peer runs on, after a restart as before."""
    dice = random.Random(f"{seed}/{name}/machine")
    return Machine(1 + dice.uniform(-SKEW, SKEW), dice.uniform(-WRONG_CLOCK_S, WRONG_CLOCK_S))


def _odds(dice: random.Random) -> Odds:
    """Each seed leaves some faults out, so that the others are seen alone as well."""

    def perhaps(most: float) -> float:
        return dice.choice([0.0, 0.3, 1.0]) * most

    faults = [fault for fault in StoreFault if fault is not StoreFault.DENIED and dice.random() < 0.6]
    return Odds(
        latency_s=dice.choice([0.002, 0.02, 0.2]),
        lost_request=perhaps(0.04),
        lost_answer=perhaps(0.04),
        breaks=dice.choice([0.0, 0.5, 1.0]),
        late=perhaps(0.02),
        lost_word=perhaps(0.2),
        lost_news=dice.choice([0.0, 0.3, 1.0]),
        late_news=perhaps(0.5),
        store=perhaps(0.3) if faults else 0.0,
        store_faults=tuple(faults),
    )


def _incidents(dice: random.Random, names: list[str]) -> tuple[Incident, ...]:
    found = []
    for _ in range(dice.randint(0, 8)):
        kind = dice.choice(list(Kind))
        who = "" if kind in EVERYBODY else dice.choice(names)
        if kind is Kind.JOIN:
            who = dice.choice(["learner", "sampler", "sampler", "verifier"])
        found.append(Incident(dice.uniform(0.5, STORM_S), kind, who, dice.choice([0.5, 3.0, 8.0, 20.0])))
    return tuple(sorted(found, key=lambda incident: incident.at))
