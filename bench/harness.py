"""What all benches share: goals, the description of the machine, and the one line of JSON.

A bench says what it does on stderr and ends with one JSON object on the last line of stdout:

    {"bench": "codec", "figures": {…}, "goals": [{"name", "value", "goal", "met"}, …], "machine": {…}}

With ``--json`` only that line goes to stdout; without it a person gets the figures as text first.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

Figure = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Goal:
    """What a value should be. Give one bound, or both for a band.

    Example: ``Goal("encode_ms", 0.34, at_most=1.0)`` is met.
    """

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        """A goal without a bound could not be missed."""
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"goal {self.name} has no bound")

    @property
    def met(self) -> bool:
        """Whether the value is a number within the bounds."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= self.value <= high

    @property
    def goal(self) -> str:
        """The bounds as text: ``>= 0.9``, ``<= 5``."""
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def say(text: str) -> None:
    """Progress, for a person who waits."""
    print(text, file=sys.stderr, flush=True)


def timed_ms(call: Callable[[], object], repeats: int, warm_up: int = 3) -> float:
    """Median wall time of ``call`` in milliseconds."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def report(figures: Mapping[str, Figure], goals: Sequence[Goal] = ()) -> None:
    """Print the result; call it last. A missed goal is a finding, not a failure of the bench."""
    result = {
        "bench": Path(sys.argv[0]).stem,
        "figures": {name: _finite(value) for name, value in figures.items()},
        "goals": [{"name": g.name, "value": _finite(g.value), "goal": g.goal, "met": g.met} for g in goals],
        "machine": machine(),
    }
    if "--json" not in sys.argv:
        for name, value in figures.items():
            print(f"{name:40} {f'{value:.4g}' if isinstance(value, float) else value}")
        for goal in goals:
            print(f"{'met ' if goal.met else 'MISSED':8} {goal.name} {goal.value:.4g}, goal {goal.goal}")
    print(json.dumps(result, allow_nan=False), flush=True)


def machine() -> dict[str, Figure]:
    """What a reader needs to judge the figures, and nothing that names the machine or its owner."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
    }


def _finite(value: Figure) -> Figure:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
