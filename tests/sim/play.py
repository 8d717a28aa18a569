"""One seed, from its plan to a verdict: the storm rages, calms down, and the run must end well.

    plan ─▶ peers start ─▶ large faults ─▶ calm ─▶ the run ends ─▶ every promise was kept

Every few seconds of it the books must balance.
"""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from node.virtual_time import Deadlock, simulate
from protocol.subjects import FINISHED_KEY, Bucket
from roles.policy.compose import VERSION_ROUNDING
from roles.ring import cancelled
from tests.sim.books import check_progress, check_promises, read_books
from tests.sim.cast import Cast
from tests.sim.incidents import happen
from tests.sim.plan import Plan
from tests.sim.storm import Storm
from tests.sim.trace import Trace

CALM_AT_S = 65.0
"""The longest large fault is over."""
LOOK_S = 2.0
"""Virtual seconds between two looks at the books."""
ENDS_WITHIN_S = 300.0
"""Virtual seconds from the last fault to the end of the run."""
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Verdict:
    """What became of a seed."""

    seed: int
    failure: str
    """Empty if every promise was kept."""
    seconds: float
    """Virtual seconds that it took."""
    calm_s: float
    """Of these, after the last fault."""
    happened: dict[str, int]
    """Large faults by kind."""
    lines: tuple[str, ...]
    """The trace, if it was kept."""

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return not self.failure


class Play:
    """One seed on its stage."""

    def __init__(self, plan: Plan, directory: Path, trace: Trace) -> None:
        self.trace = trace
        self.storm = Storm(plan, directory, trace)
        self.cast = Cast(self.storm)
        self.calm_since: float | None = None
        self.finished = False

    async def run(self) -> None:
        """Raises AssertionError with the promise that was broken."""
        await self.storm.create()
        for name, role in self.storm.plan.peers.items():
            self.cast.start(role, name)
        weather = asyncio.create_task(self._weather(), name="weather")
        try:
            while not self._is_over():
                await self.storm.clock.sleep(LOOK_S)
                self._look()
                if weather.done():
                    weather.result()
        finally:
            await cancelled(weather)
            await self.cast.end()
        self._judge()

    async def _weather(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._calm_down())
            for incident in self.storm.plan.incidents:
                group.create_task(happen(self.storm, self.cast, incident))
        self.calm_since = self.storm.clock.monotonic()
        self.trace.add("weather", "calm")

    async def _calm_down(self) -> None:
        """From some time on nothing new goes wrong; an operator may still be busy with what did."""
        await self.storm.clock.sleep(CALM_AT_S)
        self.storm.rages = False

    def _is_over(self) -> bool:
        run = self.storm.operator().bus.peek()
        self.finished |= run is not None and run.buckets[Bucket.RUN].get(FINISHED_KEY) is not None
        return self.finished and self.storm.can_be_read and not self.cast.running()

    def _look(self) -> None:
        assert self.cast.broken == [], self.cast.broken[0]
        assert self.storm.watch.broken == [], self.storm.watch.broken[0]
        if self.storm.can_be_read:
            check_progress(self.storm, read_books(self.storm))
        if self.calm_since is not None:
            waited_s = self.storm.clock.monotonic() - self.calm_since
            assert waited_s <= ENDS_WITHIN_S, f"not over {waited_s:.0f} s after the last fault"

    def _judge(self) -> None:
        books = read_books(self.storm)
        check_promises(self.storm, books)
        version = sum(head.weight for head in books.heads.values())
        wanted = self.storm.spec.learner.updates
        assert version >= wanted - VERSION_ROUNDING, f"the run ended at version {version:g} of {wanted}"


def play(seed: int, *, keep_trace: bool = False) -> Verdict:
    """Play one seed, on one thread and without waiting."""
    plan, trace = Plan.of(seed), Trace(keep=keep_trace)
    plays: list[Play] = []
    ended_at = 0.0

    async def on_stage(directory: Path) -> None:
        nonlocal ended_at
        plays.append(Play(plan, directory, trace))
        try:
            await plays[0].run()
        except AssertionError as exc:
            trace.add("verdict", "promise_broken", promise=_first_line(exc))
            raise
        finally:
            ended_at = plays[0].storm.clock.monotonic()

    failure = ""
    with tempfile.TemporaryDirectory() as directory, trace.listening():
        try:
            simulate(lambda: on_stage(Path(directory)), limit_s=LIMIT_S)
        except (AssertionError, Deadlock) as exc:
            failure = _first_line(exc)
        except TimeoutError:
            failure = f"not over after {LIMIT_S:.0f} s"
    calm_since = plays[0].calm_since if plays else None
    return Verdict(
        seed,
        failure,
        ended_at,
        ended_at - calm_since if calm_since is not None else 0.0,
        dict(Counter(kind.value for kind in plays[0].storm.happened)) if plays else {},
        tuple(trace.lines),
    )


def _first_line(exc: BaseException) -> str:
    place = traceback.extract_tb(exc.__traceback__)[-1]
    return (str(exc) or f"{type(exc).__name__} in {place.name}: {place.line}").splitlines()[0]
