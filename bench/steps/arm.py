"""What every arm of ``bench.learner`` has in common: its command line, its memory, its line of JSON.

An arm runs in a process of its own, so that its peak of memory is its own. It loads, does one tiny step to
warm up, then the same step as often as asked. Standard library only: TRL's environment imports it too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

WARM_UP_TOKENS = 4
"""Prompt and completion of a row of the warm-up step."""


@dataclass(slots=True)
class ArmResult:
    """What an arm found, one entry a step in the lists."""

    arm: str
    setting: str
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of all threads, which neighbours on the machine disturb less."""
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    loaded_bytes: int = 0
    """Held after loading the model with its adapter, all weights touched."""
    peak_bytes: int = 0
    """Most held at once while stepping."""
    profile: dict[str, float] = field(default_factory=dict)
    """With ``--profile``: see ``bench/steps/ceiling.py``."""

    def print(self) -> None:
        """The last line of the process."""
        print(json.dumps(asdict(self)), flush=True)


def arguments(about: str | None) -> argparse.Namespace:
    """The command line of an arm."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("model", type=Path)
    parser.add_argument("batch", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=1, help="rows (ours: tokens) of a micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="TRL: recompute activations")
    parser.add_argument("--profile", action="store_true", help="ours: one more step under torch.profiler")
    return parser.parse_args()


def held_bytes() -> int:
    """Resident memory now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_bytes()


def peak_bytes() -> int:
    """Most resident memory since the start, or since ``forget_peak`` where the system can forget."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text("ascii").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Start the peak anew (Linux), so that what loading took for a moment does not count."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5", "ascii")


def measure(result: ArmResult, step: Callable[[], tuple[float, float]], steps: int) -> None:
    """Time ``step``, which gives loss and gradient norm."""
    for _ in range(steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        loss, grad_norm = step()
        result.step_s.append(time.perf_counter() - started)
        result.cpu_s.append(time.process_time() - cpu_started)
        result.loss.append(loss)
        result.grad_norm.append(grad_norm)
    result.peak_bytes = peak_bytes()
