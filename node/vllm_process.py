"""A vLLM server as a child of this node, with all the processes it starts."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from node.children import Child, last_words, start_child, stop_children
from protocol.errors import OperatorError, one_line

STOP_S = 10.0
"""For a server to end in order; it has nothing to save."""

LINES = 400
"""Last lines of a log among which the fault is looked for."""

FAULT = re.compile(r"(?:^|[\s)])((?:\w+\.)*\w*(?:Error|Exception): .*|error: .*)")


class VllmProcess:
    """Implements ``ServerProcess``."""

    def __init__(self, child: Child) -> None:
        """Take over a child that leads a process group of its own."""
        self._child = child

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> VllmProcess:
        """Start a server; what it prints goes to ``log``. Raises OperatorError without the command."""
        try:
            return cls(await start_child(name, command, environ, log))
        except OSError as exc:
            raise OperatorError(
                f"vLLM cannot be started by {command[0]!r} ({exc.strerror}): "
                "pip install 'grpo-node[vllm]', or name another with --vllm-command"
            ) from exc

    @property
    def pid(self) -> int:
        """Of the process that leads its group."""
        return self._child.process.pid

    async def ended(self) -> None:
        """Wait for its end."""
        await self._child.process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left of its group: the engine has a process of its own."""
        try:
            await stop_children([self._child], STOP_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._child.process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The first error of the last start, which causes the others, or the log's last line."""
        lines = last_words(self._child.log, LINES).splitlines()
        faults = [found[1] for line in lines if (found := FAULT.search(line))]
        said = [fault for fault in faults if "Engine core initialization failed" not in fault]
        text = (said or faults or [line for line in lines if line.strip()] or ["it said nothing"])[-1]
        return f"{one_line(text)} (all of it in {self._child.log})"


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
