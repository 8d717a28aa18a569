"""``grpo-node …`` in this process: what it says, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from node.cli.main import main


@dataclass
class Said:
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line that a mistake is answered with."""
        lines = [line for line in self.err.splitlines() if line.startswith("grpo-node: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


Command = Callable[..., Said]


def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """``run("jobs", "up", …)``."""

    def run(*arguments: str) -> Said:
        code = 0
        try:
            main(list(arguments))
        except SystemExit as exc:
            code = int(exc.code or 0)
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return run
