"""One worker process as its parent sees it: started, asked, killed. They share two pipes only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import roles
from protocol.errors import GrpoError, OperatorError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.reward import Item, Score

REPLY_BYTES_MAX = 16 << 10
"""A reply is a number and a note; a worker that says more is killed."""

PIPE_CLOSES_S = 1.0

START_TIMEOUT_S = 120.0
"""Imports of a user's reward may be slow; after this long the worker counts as broken."""


class WorkerDied(GrpoError):
    """The process ended or talked nonsense instead of replying."""


class WorkerProcess:
    """A running worker that has imported its rewards."""

    def __init__(self, process: Process, specs: Sequence[RewardSpec]) -> None:
        """Use ``start``."""
        self._process = process
        self._specs = list(specs)
        self.usable = True

    @property
    def pid(self) -> int:
        """Process id, which is its process group's id too."""
        return self._process.pid

    @classmethod
    async def start(cls, specs: Sequence[RewardSpec]) -> WorkerProcess:
        """Start and wait until it is ready. Raises OperatorError if a reward cannot be opened."""
        (root, *_) = roles.__path__
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "roles.verifier.rewards.worker",
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=Path(root).parent, start_new_session=True,
            limit=REPLY_BYTES_MAX,
        )  # fmt: skip
        worker = cls(process, specs)
        try:
            await worker._prepare()
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def _prepare(self) -> None:
        rewards = [spec.model_dump(mode="json") for spec in self._specs]
        cwd = str(Path.cwd())  # where a user's own reward lies, also when a console script was started
        names = ", ".join(spec.name for spec in self._specs)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self._exchange({"path": [*sys.path, cwd], "cwd": cwd, "rewards": rewards})
        except (WorkerDied, TimeoutError) as exc:
            raise OperatorError(f"rewards {names}: the worker ends while it imports them") from exc
        if "error" in reply:
            raise OperatorError(reply["error"])

    async def ask(self, spec: RewardSpec, item: Item) -> Score:
        """Score within the spec's limits, which count as 0.0; raises WorkerDied. Kills itself if need be."""
        job = {"reward": self._specs.index(spec), "item": asdict(item)}
        self.usable = False
        try:
            async with asyncio.timeout(spec.timeout_s):
                reply = await self._exchange(job)
        except TimeoutError:
            await self.kill()
            return Score(0.0, note="timeout")
        except BaseException:
            await self.kill()
            raise
        if "memory" in reply:
            await self.kill()
            return Score(0.0, note="memory")
        self.usable = True
        reason = reply["unscorable"]
        return Score(reply["value"], Unscorable(reason) if reason else None, reply["note"])

    async def kill(self) -> None:
        """End it and everything that it started, and wait until it is gone."""
        self.usable = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        await self._process.wait()
        # Reading to the end closes the pipe, unless a grandchild that left the group still holds it.
        with contextlib.suppress(TimeoutError, ValueError):
            async with asyncio.timeout(PIPE_CLOSES_S):
                await self._process.stdout.read()

    async def _exchange(self, job: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(job, default=str).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
            reply = json.loads(line)
        except (ConnectionError, ValueError) as exc:
            raise WorkerDied(f"worker {self.pid} died or spoke out of turn") from exc
        assert isinstance(reply, dict)
        return reply
