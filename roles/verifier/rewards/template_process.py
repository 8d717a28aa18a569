"""The template process as the pool sees it: started, asked for workers, asked to kill them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import roles
from protocol.errors import OperatorError
from protocol.runspec import RewardSpec
from roles.verifier.rewards.registry import Place
from roles.verifier.rewards.worker_process import REPLY_BYTES_MAX, WorkerDied, WorkerProcess

START_TIMEOUT_S = 120.0
"""Imports of a user's reward may be slow; after this long the template counts as broken."""

ENDS_S = 2.0

MODULE = "roles.verifier.rewards.template"


class TemplateProcess:
    """A process that has imported its rewards and can fork."""

    def __init__(self, process: Process, control: socket.socket, specs: Sequence[RewardSpec]) -> None:
        """Use ``start``."""
        self._process = process
        self._control = control
        self._specs = list(specs)
        self._in_turn = asyncio.Lock()
        self.protections: tuple[str, ...] = ()
        """What confines its workers, besides being killed."""
        self.for_groups: frozenset[str] = frozenset()
        """Names of rewards that score a group as one."""

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known."""
        return self._process.returncode is None

    @classmethod
    async def start(
        cls, specs: Sequence[RewardSpec], place: Place, arguments: Mapping[str, Any]
    ) -> TemplateProcess:
        """Start and wait until it is ready. Raises OperatorError if a reward cannot be opened."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # noqa: FBT003 the socket's own signature
        (root, *_) = roles.__path__
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", MODULE,
                stdin=theirs.fileno(), stdout=DEVNULL, stderr=DEVNULL,
                cwd=Path(root).parent, start_new_session=True,
            )  # fmt: skip
        template = cls(process, ours, specs)
        try:
            await template._prepare(place, arguments)
        except BaseException:
            await template.close()
            raise
        return template

    async def _prepare(self, place: Place, arguments: Mapping[str, Any]) -> None:
        cwd = str(Path.cwd())  # where a user's own reward lies, also when a console script was started
        settings = {
            "path": [*sys.path, cwd],
            "cwd": cwd,
            "place": place.value,
            "arguments": dict(arguments),
            "rewards": [spec.model_dump(mode="json") for spec in self._specs],
        }
        frame = pickle.dumps(settings)
        names = ", ".join(spec.name for spec in self._specs)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = json.loads(await self._exchange(struct.pack("!I", len(frame)) + frame))
        except (WorkerDied, TimeoutError) as exc:
            raise OperatorError(f"rewards {names}: the worker ends while it imports them") from exc
        if "error" in reply:
            raise OperatorError(reply["error"])
        self.protections = tuple(reply["protections"])
        self.for_groups = frozenset(reply["for_groups"])

    async def fork(self) -> WorkerProcess:
        """A new worker, ready at once. Raises WorkerDied when the template is gone."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = int(await self._exchange(b"fork", theirs.fileno()))
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=REPLY_BYTES_MAX)
        except BaseException:
            ours.close()  # a worker that was forked all the same sees its end
            raise
        return WorkerProcess(pid, reader, writer, self._specs, self.kill)

    async def kill(self, pid: int) -> None:
        """End a worker and its process group, and return once it is gone."""
        try:
            await self._exchange(b"kill %d" % pid)
        except WorkerDied:  # nobody is left who could have waited for it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the template; kill its workers before."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            async with asyncio.timeout(ENDS_S):
                await self._process.wait()
        except TimeoutError:  # it still imports
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        async with self._in_turn:  # whoever still waited for an answer has seen the end
            self._control.close()

    async def _exchange(self, command: bytes, handle: int | None = None) -> bytes:
        """One command and its answer; raises WorkerDied."""
        exchange = asyncio.ensure_future(self._exchanged(command, handle))
        exchange.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits
        return await asyncio.shield(exchange)

    async def _exchanged(self, command: bytes, handle: int | None) -> bytes:
        loop, answer = asyncio.get_running_loop(), b""
        async with self._in_turn:
            try:
                if handle is None:
                    await loop.sock_sendall(self._control, command)
                else:
                    socket.send_fds(self._control, [command], [handle])
                while not answer.endswith(b"\n"):
                    piece = await loop.sock_recv(self._control, REPLY_BYTES_MAX)
                    if not piece:
                        raise WorkerDied("the workers' template died")
                    answer += piece
            except OSError as exc:
                raise WorkerDied("the workers' template died") from exc
        return answer
