"""Progress of a run, read off its telemetry (pure): what demo, up and watch show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.messages import Event

BLOCKS = " ▁▂▃▄▅▆▇█"
RECENT = 10
"""Steps over which the shown reward is averaged."""


@dataclass
class Progress:
    """The run so far."""

    updates_wanted: int
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    evals: list[tuple[float, float]] = field(default_factory=list)
    """(version, reward on held-out problems)."""
    staleness_max: float = 0.0
    staleness_mean: float = 0.0
    version: float = 0.0
    in_flight: int = 0
    ratio_deviation_max: float = 0.0
    """Largest |ratio - 1| of any token sampled under exactly the policy that trained on it."""
    blocked_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    groups_trained: int = 0
    publish_s: list[float] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    finished: bool = False
    tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0

    def take(self, event: Event) -> None:
        """Take in one event; unknown ones are of no interest here."""
        fields = event.fields
        number = {key: float(value) for key, value in fields.items() if isinstance(value, int | float)}
        match event.name:
            case "step_trained":
                self._step(event.at, number)
            case "update_committed":
                self.groups_trained = int(number.get("groups_trained", 0))
                self.publish_s.append(number.get("publish_s", 0.0))
            case "evaluated" if "reward" in number:
                self.evals.append((number.get("version", 0.0), number["reward"]))
            case "update_rejected":
                self.rejected.append(str(fields.get("reason")))
            case "group_sampled":
                self.tokens += int(number.get("tokens", 0))
            case "run_finished":
                self.finished = True

    def _step(self, at: float, number: dict[str, float]) -> None:
        self.first_at = self.first_at or at
        self.last_at = at
        self.rewards.append(number.get("reward", 0.0))
        self.version = number.get("version", self.version)
        self.in_flight = int(number.get("rollout/inflight", 0))
        self.staleness_mean = number.get("sample/staleness_mean", 0.0)
        self.staleness_max = max(self.staleness_max, number.get("sample/staleness_max", 0.0))
        self.ratio_deviation_max = max(self.ratio_deviation_max, number.get("ratio_max_dev_on_policy", 0.0))
        self.blocked_s += number.get("perf/publish_blocked_s", 0.0)
        self.step_s += number.get("perf/step_s", 0.0)
        self.wait_s += number.get("perf/rollout_wait_s", 0.0)

    @property
    def reward(self) -> float:
        """Mean reward of the last steps."""
        return mean(self.rewards[-RECENT:])

    @property
    def reward_first(self) -> float:
        """Mean reward of the first steps."""
        return mean(self.rewards[: min(RECENT, 3)])

    def line(self, alive: Sequence[str]) -> str:
        """One line for a log or a narrow terminal."""
        evaluated = f"  held-out {self.evals[-1][1]:.2f}" if self.evals else ""
        return (
            f"update {self.version:.0f}/{self.updates_wanted}  reward {self.reward:.2f}{evaluated}  "
            f"staleness {self.staleness_mean:.1f} (max {self.staleness_max:.0f})  "
            f"in flight {self.in_flight}  alive: {', '.join(alive)}"
        )


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, 0 for nothing."""
    return sum(values) / len(values) if values else 0.0


def curve(values: Sequence[float], width: int = 60, height: int = 6) -> list[str]:
    """A small plot of values in [0, 1] for a terminal: ``height`` lines, eight levels in each."""
    if not values:
        return []
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    columns = [mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    lines = []
    for row in reversed(range(height)):
        cells = (min(1.0, max(0.0, column * height - row)) for column in columns)
        label = f"{(row + 1) / height:4.2f} " if row in (height - 1, height // 2 - 1) else "     "
        lines.append(label + "".join(BLOCKS[round(cell * 8)] for cell in cells))
    return lines
