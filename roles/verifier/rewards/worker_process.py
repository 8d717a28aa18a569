"""One worker process as its parent sees it: given batches, listened to, killed. They share one socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pickle
import struct
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from protocol.errors import GrpoError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.reward import NOTE_CHARS_MAX, Item, Score

REPLY_BYTES_MAX = 16 << 10
"""A reply is a number and a note; a worker that says more is killed."""

SLOW_NICENESS = 19

_SCHEDULER_CLOCK = 2
"""With a process id it makes the id of that process's clock (``man 3 clock_getcpuclockid``)."""


class WorkerDied(GrpoError):
    """The process ended or talked nonsense instead of replying."""


class WorkerProcess:
    """A running worker that knows its rewards."""

    def __init__(
        self,
        pid: int,
        reader: StreamReader,
        writer: StreamWriter,
        specs: Sequence[RewardSpec],
        kill: Callable[[int], Awaitable[None]],
    ) -> None:
        """``pid`` is its process group's id too."""
        self.pid = pid
        self.usable = True
        self._reader = reader
        self._writer = writer
        self._specs = list(specs)
        self._kill = kill
        self._ending: asyncio.Future[None] | None = None

    def give(self, spec: RewardSpec, items: Sequence[Item]) -> None:
        """Send a batch; its replies come one by one."""
        frame = pickle.dumps((self._specs.index(spec), list(items)))
        self._writer.write(struct.pack("!I", len(frame)) + frame)

    async def reply(self, limit_s: float) -> Score:
        """The next item's score; a limit that was hit is 0.0 with the note ``timeout`` or ``memory``.

        Raises WorkerDied. After anything but a score the worker is dead.
        """
        try:
            async with asyncio.timeout(limit_s):
                said = await self._said()
        except TimeoutError:
            await self.kill()
            return Score(0.0, note="timeout")
        except BaseException:
            await self.kill()
            raise
        if said is None:
            await self.kill()
            return Score(0.0, note="memory")
        return said

    async def _said(self) -> Score | None:
        try:
            return _understood(json.loads(await self._reader.readline()))
        except (ConnectionError, ValueError, TypeError, KeyError) as exc:
            raise WorkerDied(f"worker {self.pid} died or spoke out of turn") from exc

    def cpu_s(self) -> float:
        """Seconds of processor time that it has used; 0 where the system does not tell."""
        if sys.platform != "linux":
            return 0.0
        with contextlib.suppress(OSError):
            return time.clock_gettime(~self.pid << 3 | _SCHEDULER_CLOCK)
        return 0.0

    def yield_to_others(self) -> None:
        """Let everybody else's work come first; this worker is spent afterwards."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, self.pid, SLOW_NICENESS)
            if sys.platform == "linux":
                os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))

    async def kill(self) -> None:
        """End it and everything that it started, and wait until it is gone."""
        self.usable = False
        if self._ending is None:
            self._writer.close()
            self._ending = asyncio.ensure_future(self._kill(self.pid))
        await asyncio.shield(self._ending)


def _understood(said: dict[str, Any]) -> Score | None:
    """A reply, believed no further than its types; None: out of memory. Raises ValueError and its like."""
    if "memory" in said:
        return None
    value, reason = said["value"], said["unscorable"]
    if (value is None) != (reason is not None) or not math.isfinite(value or 0.0):
        raise ValueError("neither a number nor a reason")
    score = None if value is None else float(value)
    return Score(score, Unscorable(reason) if reason else None, str(said["note"])[:NOTE_CHARS_MAX])
