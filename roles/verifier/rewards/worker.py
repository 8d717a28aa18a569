"""A reward worker: ``python -m roles.verifier.rewards.worker``, one JSON object a line in and out.

    → {"path": [...], "cwd": "...", "rewards": [...]}     ← {"ready": true} or {"error": "one line"}
    → {"reward": 0, "item": {...}}                        ← {"value", "unscorable", "note"}, {"memory": true}

It exists to be killed: what it scores may hang, eat memory, crash or print, and only a process can be stopped
for certain. It ends when its input ends, so it does not outlive its parent: a thread waits for that while the
main thread scores, and an alarm of the kernel ends it even inside one long C call.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.registry import open_reward
from roles.verifier.rewards.reward import NOTE_CHARS_MAX, Item, Reward, Score

ALARM_AFTER_S = 1.0
"""How long after its time limit an orphan still lives; the parent kills earlier."""

Job = dict[str, Any]


class Worker:
    """Scores one item at a time, under limits."""

    def __init__(self, replies: TextIO) -> None:
        """``replies`` goes to the parent."""
        self._replies = replies
        self._specs: list[RewardSpec] = []
        self._rewards: list[Reward] = []
        self._runner = asyncio.Runner()
        self._ready_bytes = 0

    def prepare(self, job: Job) -> None:
        """Import everything that scoring needs, before any limit and any clock starts."""
        sys.path[:] = job["path"]
        os.chdir(job["cwd"])
        self._specs = [RewardSpec.model_validate(spec) for spec in job["rewards"]]
        try:
            self._rewards = [open_reward(spec) for spec in self._specs]
        except OperatorError as exc:
            self._reply({"error": str(exc)})
            return
        self._ready_bytes = _address_space_bytes()
        self._reply({"ready": True})

    def score(self, job: Job) -> None:
        """Score one item and reply."""
        spec, reward = self._specs[job["reward"]], self._rewards[job["reward"]]
        signal.setitimer(signal.ITIMER_REAL, spec.timeout_s + ALARM_AFTER_S)
        self._limit_memory(spec.memory_bytes_max)
        found = self._runner.run(_outcome(reward, Item(**job["item"])))
        self._limit_memory(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._reply(_described(found))

    def _limit_memory(self, more_bytes: int | None) -> None:
        """Allow ``more_bytes`` beyond what the worker held when it was ready, or lift the limit."""
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = hard if more_bytes is None or not self._ready_bytes else self._ready_bytes + more_bytes
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _reply(self, reply: Job) -> None:
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()


async def _outcome(reward: Reward, item: Item) -> Score | BaseException:
    """A score, or whatever the reward raised: it may be anybody's code."""
    return (await asyncio.gather(reward.score(item), return_exceptions=True))[0]


def _described(found: Score | BaseException) -> Job:
    if isinstance(found, MemoryError):
        return {"memory": True}
    if isinstance(found, BaseException):
        text = str(found).strip().partition("\n")[0]
        found = Score.none(Unscorable.REWARD_FAILED, f"{type(found).__name__}: {text}")
    note = found.note[:NOTE_CHARS_MAX].encode("utf-8", "replace").decode()
    return {"value": found.value, "unscorable": found.unscorable, "note": note}


def _address_space_bytes() -> int:
    """Address space in use; 0 where the platform does not say, which leaves memory unlimited."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text("ascii").split()[0]) * resource.getpagesize() if statm.exists() else 0


def _read_jobs(jobs: queue.SimpleQueue[Job]) -> None:
    """Pass lines on until the parent closes the pipe or dies, then leave at once, busy or not."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Serve the parent until it goes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a reward prints must not look like a reply
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    worker = Worker(replies)
    worker.prepare(jobs.get())
    while True:
        worker.score(jobs.get())


if __name__ == "__main__":
    main()
