"""From what nodes tell of their work to the way of each version, phase by phase (pure).

    optimizer step ─ snapshot ─ queue ─ upload ─ commit ─┐
            first token ─ start ─ load ─ compose ─ fetch ─ busy ─ announce

All nodes share this machine's clock, so that an event's time and the seconds in its fields tell when each
phase began and ended. A phase that overlaps with the one before counts from that one's end: phases add up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from protocol.messages import Event

PHASES = (
    "snapshot",
    "queue",
    "upload",
    "commit",
    "announce",
    "busy",
    "fetch",
    "compose",
    "load",
    "start",
    "first_token",
)
LOADED = PHASES.index("load") + 1
"""Phases until a sampler could begin under the new version."""

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Told:
    """The numbers of an event, and its time in Unix seconds."""

    at: float
    numbers: Numbers

    @classmethod
    def of(cls, event: Event) -> Told:
        """Texts are of no interest here."""
        numbers = {
            name: float(value) for name, value in event.fields.items() if isinstance(value, int | float)
        }
        return cls(event.at, numbers)

    def before(self, *fields: str) -> float:
        """When what took these fields' seconds, up to the event, began."""
        return self.at - sum(self.numbers[name] for name in fields)


@dataclass(frozen=True, slots=True)
class Way:
    """One version on its way to one sampler; seconds by phase, to ``load`` if nothing was sampled."""

    version: int
    sampler: str
    seconds: tuple[float, ...]

    @property
    def loaded_s(self) -> float:
        """From the optimizer step until the sampler serves it."""
        return sum(self.seconds[:LOADED])

    @property
    def total_s(self) -> float:
        """From the optimizer step to the first token."""
        return sum(self.seconds) if self.sampled else math.nan

    @property
    def sampled(self) -> bool:
        """Whether the sampler began a group under it before it served a newer one."""
        return len(self.seconds) == len(PHASES)


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a run: versions from ``first`` to ``last``, and the samplers that took part."""

    first: int
    last: int
    samplers: tuple[str, ...]

    def __contains__(self, version: int) -> bool:
        """Whether a version belongs to it."""
        return self.first <= version <= self.last


@dataclass
class Timeline:
    """Everything that was told and matters here."""

    steps: dict[int, Told] = field(default_factory=dict)
    """By the version that the step made."""
    commits: dict[int, Told] = field(default_factory=dict)
    loads: dict[tuple[str, int], Told] = field(default_factory=dict)
    """By sampler and version."""
    firsts: dict[tuple[str, int], Told] = field(default_factory=dict)
    groups: list[tuple[str, Told]] = field(default_factory=list)
    awaited: list[tuple[str, Told]] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Take in one event."""
        told = Told.of(event)
        version = round(told.numbers.get("version", 0))
        match event.name:
            case "step_trained":
                self.steps[version] = told
            case "update_committed":
                self.commits[version] = told
            case "policy_loaded":
                self.loads.setdefault((event.node, version), told)
            case "policy_sampled":
                self.firsts.setdefault((event.node, version), told)
            case "group_sampled":
                self.groups.append((event.node, told))
            case "policy_awaited":
                self.awaited.append((event.node, told))

    @property
    def version(self) -> int:
        """The newest that was committed."""
        return max(self.commits, default=0)

    def has_loaded(self, samplers: Collection[str], version: int) -> bool:
        """Whether each of these samplers serves this version or a newer one."""
        reached = {sampler for sampler, loaded in self.loads if loaded >= version}
        return set(samplers) <= reached

    def has_sampled(self, samplers: Collection[str], version: int) -> bool:
        """Whether each of these samplers has sampled under this version or a newer one."""
        reached = {sampler for sampler, sampled in self.firsts if sampled >= version}
        return set(samplers) <= reached

    def ways(self, window: Window) -> Iterator[Way]:
        """Every version of a window with every sampler of it that loaded it."""
        for (sampler, version), loaded in self.loads.items():
            if sampler in window.samplers and version in window:
                seconds = self._seconds(version, loaded, self.firsts.get((sampler, version)))
                yield Way(version, sampler, seconds)

    def _seconds(self, version: int, loaded: Told, first: Told | None) -> tuple[float, ...]:
        step, commit = self.steps[version], self.commits[version]
        publish = commit.before("publish_s")
        marks = [
            step.before("perf/publish_blocked_s", "perf/publish_s"),
            step.before("perf/publish_blocked_s"),
            publish,
            publish + commit.numbers["upload_s"],
            publish + commit.numbers["upload_s"] + commit.numbers["commit_s"],
            loaded.before("load_s", "compose_s", "fetch_s", "waited_s"),
            loaded.before("load_s", "compose_s", "fetch_s"),
            loaded.before("load_s", "compose_s"),
            loaded.before("load_s"),
            loaded.at,
        ]
        if first is not None:
            marks.append(loaded.at + first.numbers["start_s"])
            marks.append(marks[-1] + first.numbers["first_token_s"])
        for place in range(1, len(marks)):
            marks[place] = max(marks[place - 1], marks[place])
        return tuple(after - before for before, after in pairwise(marks))

    def skipped(self, window: Window) -> int:
        """Versions that a sampler did not load, since a newer one was there before it came to them."""
        versions = range(window.first, window.last + 1)
        return sum((name, version) not in self.loads for name in window.samplers for version in versions)

    def update_every_s(self, window: Window) -> float:
        """Mean seconds from one optimizer step to the next, all waiting included."""
        steps = [told.numbers for version, told in self.steps.items() if version in window]
        times = ("perf/rollout_wait_s", "perf/step_s", "perf/publish_blocked_s")
        return fmean(sum(step[name] for name in times) for step in steps)

    def learner_blocked(self, window: Window) -> tuple[float, float]:
        """The learner's seconds in which publishing kept it from training, as a share of all time, and of the
        time that it did not wait for rollouts."""
        steps = [told.numbers for version, told in self.steps.items() if version in window]
        blocked_s = sum(step["perf/publish_s"] + step["perf/publish_blocked_s"] for step in steps)
        own_s = sum(step["perf/step_s"] + step["perf/publish_blocked_s"] for step in steps)
        waited_s = sum(step["perf/rollout_wait_s"] for step in steps)
        return blocked_s / (waited_s + own_s), blocked_s / own_s

    def sampler_blocked(self, window: Window) -> float:
        """The largest share of any sampler's time in which rows, or tasks that were not begun for want of a
        policy, waited and nothing was decoded; whether a switch was the reason or not."""
        begin, end = self.steps[window.first].at, self.commits[window.last].at
        shares = []
        for sampler in window.samplers:
            groups = [told.numbers for told in _of(self.groups, sampler, begin, end)]
            generation_s = sum(group["generation_s"] for group in groups)
            held_s = sum(group.get("held_s", 0.0) for group in groups)
            awaited_s = sum(told.numbers["seconds"] for told in _of(self.awaited, sampler, begin, end))
            shares.append((held_s / generation_s if generation_s else 0.0) + awaited_s / (end - begin))
        return max(shares)


def _of(all_told: list[tuple[str, Told]], node: str, begin: float, end: float) -> Iterator[Told]:
    """What one node told in a stretch of time."""
    return (told for name, told in all_told if name == node and begin <= told.at <= end)
