"""What an emulated node stands on: a store that takes its time, a silent voice, and a timed policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from node.entry_cache import EntryCache
from node.memory_store import MemoryBucket, MemoryStore
from protocol.manifest import Manifest
from protocol.ports import Clock
from roles.learner.policy import Sample, StepResult
from roles.learner.torch_policy import TorchPolicy
from roles.ring import Ring

T = TypeVar("T")


@dataclass
class Told:
    """What all nodes told: how often each event, and of steps a few fields."""

    events: Counter[str] = field(default_factory=Counter)
    steps: list[Mapping[str, float | str | bool | None]] = field(default_factory=list)


class QuietRing(Ring):
    """A ring whose telemetry is counted and goes nowhere: signing and sending it would cost real time."""

    told: Told

    async def tell(self, name: str, **fields: float | str | bool | None) -> None:
        """Count an event; keep the fields of a step."""
        self.told.events[name] += 1
        if name == "step_trained":
            self.told.steps.append(fields)


@dataclass
class SharedBucket:
    """The bucket of all nodes, when each entry was published, and one set of local copies for everybody."""

    cache: EntryCache
    entries: MemoryBucket = field(default_factory=MemoryBucket)
    published_at: dict[str, float] = field(default_factory=dict)


class TimedStore(MemoryStore):
    """One node's way to the bucket: a transfer takes ``transfer_s``, and ``late_s`` says how long after its
    publication an entry can be read here (0: at once)."""

    def __init__(
        self, bucket: SharedBucket, clock: Clock, transfer_s: float, late_s: Callable[[str], float]
    ) -> None:
        super().__init__(bucket.entries, bucket.cache, clock)
        self._published_at = bucket.published_at
        self._time = clock
        self._transfer_s = transfer_s
        self._late_s = late_s

    async def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write an entry."""
        await self._time.sleep(self._transfer_s)
        await super().publish(manifest, files)
        self._published_at.setdefault(manifest.path, self._time.monotonic())

    async def fetch(self, path: str) -> Path:
        """A local copy."""
        await self._arrival(path)
        await self._time.sleep(self._transfer_s)
        return await super().fetch(path)

    async def manifest(self, path: str) -> Manifest:
        """The manifest; it travels with its entry."""
        await self._arrival(path)
        return await super().manifest(path)

    async def _arrival(self, path: str) -> None:
        due = self._published_at.get(path, 0.0) + self._late_s(path)
        if (wait_s := due - self._time.monotonic()) > 0:
            await self._time.sleep(wait_s)


class CountedPolicy(TorchPolicy):
    """A policy that counts its steps, so that they can take their time."""

    steps = 0

    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        """One optimizer step."""
        self.steps += 1
        return super().step(samples, update)


class StepOffload:
    """A learner's heavy work, in line: a step takes the next of ``step_times``, all else nothing."""

    def __init__(self, policy: CountedPolicy, clock: Clock, step_times: Iterator[float]) -> None:
        self._policy = policy
        self._clock = clock
        self._step_times = step_times

    async def __call__(self, work: Callable[[], T], /) -> T:
        """Do it, and let its time pass."""
        before = self._policy.steps
        result = work()
        if self._policy.steps > before:
            await self._clock.sleep(next(self._step_times))
        return result


async def in_line(work: Callable[[], T]) -> T:
    """Heavy work that takes no time."""
    return work()
