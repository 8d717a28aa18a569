"""A reward worker: forked from its template, it scores batches of items and answers one line an item.

    → index of a reward and its items, pickled, behind their length
    ← {"value", "unscorable", "note"} or {"memory": true}, a line an item, in order, each when it is known

It exists to be killed: what it scores may hang, eat memory, crash or print, and only a process can be
stopped for certain. It ends when its socket ends, so it does not outlive its parent: a thread waits for that
while the main thread scores, and an alarm of the kernel ends it even inside one long C call.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.sandbox.confinement import Lock
from roles.verifier.rewards.reward import NOTE_CHARS_MAX, GroupReward, Item, Reward, Score

ALARM_AFTER_S = 1.0
"""How long after its time limit an orphan still lives; the parent kills earlier."""

Batch = tuple[int, list[Item]]
Found = Score | BaseException


class Worker:
    """Scores one item (or one group, for rewards of groups) at a time, under limits."""

    def __init__(
        self,
        parent: socket.socket,
        specs: Sequence[RewardSpec],
        rewards: Sequence[Reward | GroupReward],
        address_space_bytes: int,
        lock: Lock | None,
    ) -> None:
        """``address_space_bytes`` is what this process holds before it scored anything, 0 if unknown."""
        self._parent = parent
        self._specs = specs
        self._rewards = rewards
        self._ready_bytes = address_space_bytes
        self._lock = lock
        self._batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._runner: asyncio.Runner | None = None

    def run(self) -> None:
        """Serve until killed."""
        if self._lock is not None:
            self._lock.put_on()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        threading.Thread(target=self._receive, daemon=True).start()
        while True:
            self._score(*self._batches.get())

    def _receive(self) -> None:
        """Pass batches on until the parent closes the socket or dies, then leave at once, busy or not."""
        with self._parent.makefile("rb") as incoming:
            while head := incoming.read(4):
                (size,) = struct.unpack("!I", head)
                self._batches.put(pickle.loads(incoming.read(size)))  # noqa: S301 from the parent
        os._exit(0)

    def _score(self, index: int, items: list[Item]) -> None:
        spec, reward = self._specs[index], self._rewards[index]
        if isinstance(reward, GroupReward):
            found = self._limited(spec, reward.score_group(items))
            scores = found if isinstance(found, list) else [found] * len(items)
            for one in scores:
                self._reply(one)
            return
        for item in items:
            self._reply(self._limited(spec, reward.score(item)))

    def _limited(self, spec: RewardSpec, scoring: Any) -> Any:
        """What ``scoring`` gives or raises: it may be anybody's code."""
        signal.setitimer(signal.ITIMER_REAL, spec.timeout_s + ALARM_AFTER_S)
        self._limit_memory(spec.memory_bytes_max)
        if self._runner is None:
            self._runner = asyncio.Runner()
        found = self._runner.run(_outcome(scoring))
        self._limit_memory(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return found

    def _limit_memory(self, more_bytes: int | None) -> None:
        """Allow ``more_bytes`` beyond what the worker held when it was ready, or lift the limit."""
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = hard if more_bytes is None or not self._ready_bytes else self._ready_bytes + more_bytes
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _reply(self, found: Found) -> None:
        self._parent.sendall(json.dumps(_described(found)).encode() + b"\n")


async def _outcome(scoring: Any) -> Any:
    return (await asyncio.gather(scoring, return_exceptions=True))[0]


def _described(found: Found) -> dict[str, Any]:
    if isinstance(found, MemoryError):
        return {"memory": True}
    if isinstance(found, BaseException):
        text = str(found).strip().partition("\n")[0]
        found = Score.none(Unscorable.REWARD_FAILED, f"{type(found).__name__}: {text}")
    note = found.note[:NOTE_CHARS_MAX].encode("utf-8", "replace").decode()
    return {"value": found.value, "unscorable": found.unscorable, "note": note}
