"""What every arm of ``bench.sampler`` samples, and the line of JSON in which it says how that went.

Completions end after mixed lengths: one token in sixty-one ends one, whatever the model is, as an EOS would.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

EOS_EVERY = 61
"""So that about a third of the completions reach 64 tokens."""

RANK, ALPHA = 16, 32.0
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Work:
    """Groups to sample, in numbers. ``arm`` names who does it."""

    arm: str
    model: str
    groups: int
    rows: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 64
    threads: int = 2
    rank: int = RANK
    python: str = sys.executable

    @property
    def directory(self) -> Path:
        """The model's."""
        return Path(self.model)

    @property
    def vocab_size(self) -> int:
        """As the model's configuration says."""
        size: int = json.loads((self.directory / "config.json").read_text("utf-8"))["vocab_size"]
        return size

    def prompts(self, seed: int = 0) -> NDArray[np.int32]:
        """One prompt a group [groups, prompt_tokens]."""
        shape = (self.groups, self.prompt_tokens)
        return np.random.default_rng(seed).integers(3, self.vocab_size, shape, np.int32)

    def eos_ids(self) -> list[int]:
        """Tokens that end a completion."""
        return list(range(2, self.vocab_size, EOS_EVERY))

    def factors(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """A small random adapter, the same for every arm."""
        rng = np.random.default_rng(1)
        return {name: rng.normal(0, 0.02, shapes[name]).astype(np.float32) for name in sorted(shapes)}


class Stopwatch:
    """Counts what an arm sampled and how long it took; a server is told by its process."""

    def __init__(self, work: Work, server: int | None = None) -> None:
        self._work, self._server = work, server
        self._start, self._cpu = time.perf_counter(), self._cpu_s()

    def report(self, lengths: Sequence[int], group_ends_s: Sequence[float]) -> None:
        """``lengths`` of all completions; when each group was whole, as ``time.perf_counter`` says."""
        wall_s, cpu_s = time.perf_counter() - self._start, self._cpu_s() - self._cpu
        result: dict[str, Any] = {
            "tokens": sum(lengths),
            "longest": max(lengths),
            "tokens_per_s": sum(lengths) / wall_s,
            "tokens_per_cpu_s": sum(lengths) / cpu_s,
            "first_group_s": min(group_ends_s) - self._start,
            "peak_mb": self._peak_mb(),
        }
        # The result's own line is told from what libraries print by its key.
        print(json.dumps({"sampled": result, "work": asdict(self._work)}), flush=True)

    def _cpu_s(self) -> float:
        if self._server is None:
            return sum(os.times()[:4])
        return float(sum(sum(process.cpu_times()[:2]) for process in _tree(self._server)))

    def _peak_mb(self) -> float:
        """Of a server what its processes hold at the end, pages that they share counted for each."""
        if self._server is None:
            return max(_peak_mb(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return float(sum(process.memory_info().rss for process in _tree(self._server))) / 1e6


def work_of_this_process() -> Work:
    """What ``bench.sampler`` asks of an arm, as the one argument."""
    return Work(**json.loads(sys.argv[1]))


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _peak_mb(who: int) -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(who).ru_maxrss * unit / 1e6
