"""Child processes: started in a session of their own, ended in order, never left behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Between fork and exec on Linux: be terminated when the parent dies, however and whenever it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # it died before it could be watched


@dataclass(slots=True)
class Child:
    """A running child and where it writes."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.returncode is None


async def start_child(name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Child:
    """Start ``command``; what it prints goes to ``log``.

    It gets a session of its own, so that Ctrl-C in the terminal reaches only the parent, which then
    stops its children in order.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=dict(environ),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    return Child(name, process, log)


async def stop_children(children: Sequence[Child], grace_s: float) -> None:
    """SIGTERM to all, SIGKILL to those that outlive ``grace_s``; returns when all are gone."""
    running = [child for child in children if child.alive]
    for child in running:
        send(child, signal.SIGTERM)
    if running:
        waits = [asyncio.ensure_future(child.process.wait()) for child in running]
        await asyncio.wait(waits, timeout=grace_s)
    for child in running:
        if child.alive:
            send(child, signal.SIGKILL)
            await child.process.wait()


def kill(child: Child) -> None:
    """SIGKILL, as a power cut would; nothing if it is dead already."""
    send(child, signal.SIGKILL)


def send(child: Child, number: signal.Signals) -> None:
    """Send a signal; nothing if the child is dead."""
    if child.alive:
        with suppress(ProcessLookupError):  # it ends just now
            child.process.send_signal(number)


def last_words(log: Path, lines: int = 8) -> str:
    """The end of a log, for a person."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
