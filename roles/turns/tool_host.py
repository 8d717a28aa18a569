"""The process that runs tools: imports them once, then forks and locks a child for each call.

    python -m roles.turns.tool_host        (its standard input is a socket to the sampler)

    → {"functions", "path", "cwd", "timeout_s", "memory_bytes_max", "reply_bytes_max"}
    ← {"schemas", "protections"} or {"error": "one line"}
    → {"id", "name", "arguments"}, a line a call
    ← {"id", "reply"}, a line a call, as they come

The module is imported with the operator's rights, who allowed it. A call then runs without network, files
and new processes (``roles/sandbox``), for its time at most. The host ends when its socket does, and its
children with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import protocol
import roles
from protocol.errors import OperatorError
from roles.sandbox.confinement import Limits, Lock, isolate
from roles.sandbox.view import readable_paths
from roles.turns.functions import import_functions

POLL_S = 0.5
"""A host without calls looks no more often than this whether one is over time."""

ALARM_AFTER_S = 1.0
"""How long after its time limit a child still lives whose host was killed."""

_STATM = Path("/proc/self/statm")


class Function(Protocol):
    """What a child runs."""

    @property
    def name(self) -> str:
        """What calls name it by."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """What the model is told of it."""
        ...

    def reply(self, arguments: Mapping[str, Any]) -> str:
        """What it says. May raise anything."""
        ...


@dataclass(slots=True)
class _Running:
    """A call in a child."""

    call: int
    pid: int
    until: float
    said: bytearray = field(default_factory=bytearray)


def main(found: Callable[[list[str]], Sequence[Function]] = import_functions) -> None:
    """Serve the sampler until it goes, with the functions ``found`` by their names."""
    parent = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with parent.makefile("rb") as reader:
        settings = json.loads(reader.readline())
    sys.path[:] = settings["path"]
    os.chdir(settings["cwd"])
    try:
        tools = found(settings["functions"])
    except OperatorError as exc:
        _say(parent, {"error": str(exc)})
        return
    modules = {
        str(Path(sys.modules[name.partition(":")[0]].__file__ or "").parent) for name in settings["functions"]
    }
    own = [str(Path(package.__path__[0])) for package in (protocol, roles)]
    readable = readable_paths([*own, *sorted(modules)])
    statm = _STATM.open("rb", buffering=0) if _STATM.exists() else None
    protections = isolate(readable)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        memory = _held_bytes(statm)
        limits = Limits(
            cpu_s=int(settings["timeout_s"]) + 1,
            memory_bytes=memory + settings["memory_bytes_max"] if memory else None,
        )
        lock = Lock(readable, limits, isolated=bool(protections), scratch=scratch)
        kept = sorted(protections | lock.protections)
        _say(parent, {"schemas": [tool.schema for tool in tools], "protections": kept})
        Host(parent, tools, lock, settings["timeout_s"], settings["reply_bytes_max"]).serve()


class Host:
    """Runs calls at the same time, each in a child of its own."""

    def __init__(
        self,
        parent: socket.socket,
        tools: Sequence[Function],
        lock: Lock,
        timeout_s: float,
        reply_bytes_max: int,
    ) -> None:
        self._parent = parent
        self._tools = {tool.name: tool for tool in tools}
        self._lock = lock
        self._timeout_s = timeout_s
        self._reply_bytes_max = reply_bytes_max
        self._asked = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(parent, selectors.EVENT_READ)
        self._running: dict[int, _Running] = {}
        """By the end of the pipe that a child speaks into."""

    def serve(self) -> None:
        """Until the parent is gone."""
        try:
            while True:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._parent:
                        if not self._take():
                            return
                    else:
                        self._listen(key.fd)
                now = time.monotonic()
                for handle in [h for h, running in self._running.items() if running.until <= now]:
                    self._end(handle, f"error: it took longer than {self._timeout_s:g} s")
        finally:
            for running in self._running.values():
                _kill(running.pid)

    def _patience(self) -> float:
        now = time.monotonic()
        return max(0.0, min([POLL_S, *(running.until - now for running in self._running.values())]))

    def _take(self) -> bool:
        data = self._parent.recv(1 << 16)
        self._asked += data
        *lines, rest = self._asked.split(b"\n")
        self._asked = bytearray(rest)
        for line in lines:
            self._begin(json.loads(line))
        return bool(data)

    def _begin(self, call: dict[str, Any]) -> None:
        tool = self._tools.get(call["name"])
        if tool is None:
            known = ", ".join(sorted(self._tools))
            _say(
                self._parent, {"id": call["id"], "reply": f"error: there is no such tool; there are: {known}"}
            )
            return
        mine, its = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(mine)
            self._run(tool, call["arguments"], its)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # whoever of the two comes first
        os.close(its)
        self._running[mine] = _Running(call["id"], pid, time.monotonic() + self._timeout_s)
        self._selector.register(mine, selectors.EVENT_READ)

    def _run(self, tool: Function, arguments: dict[str, Any], out: int) -> NoReturn:
        """Run the tool and leave: nothing of the host may go on in a child."""
        try:
            os.setpgid(0, 0)
            self._parent.close()
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s + ALARM_AFTER_S)
            self._lock.put_on()
            reply = _reply_of(tool, arguments)
            os.write(out, b"+")
            text = reply.encode("utf-8", "replace")[: self._reply_bytes_max]
            while text:
                text = text[os.write(out, text) :]
        finally:
            os._exit(0)

    def _listen(self, handle: int) -> None:
        running = self._running[handle]
        data = os.read(handle, 1 << 16)
        running.said += data
        if data and len(running.said) <= self._reply_bytes_max + 1:
            return
        whole = running.said.startswith(b"+")
        text = running.said[1 : self._reply_bytes_max + 1].decode("utf-8", "ignore")
        self._end(handle, text if whole else "error: its process died")

    def _end(self, handle: int, reply: str) -> None:
        running = self._running.pop(handle)
        self._selector.unregister(handle)
        os.close(handle)
        _kill(running.pid)
        _say(self._parent, {"id": running.call, "reply": reply})


def _reply_of(tool: Function, arguments: dict[str, Any]) -> str:
    try:
        return tool.reply(arguments)
    except Exception as exc:  # noqa: BLE001 a tool may raise anything, and the model is told
        text = str(exc).strip().partition("\n")[0]
        return f"error: {type(exc).__name__}: {text}"


def _kill(pid: int) -> None:
    """End a child and everything in its process group. Its id stays its own until it is waited for here."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _held_bytes(statm: Any) -> int:
    """Address space in use; 0 where the platform does not say."""
    return int(os.pread(statm.fileno(), 200, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE") if statm else 0


def _say(parent: socket.socket, said: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        parent.sendall(json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
