"""A machine of one person, and the commands that are run on it as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from node.settings import read_environment

COMMAND = (sys.executable, "-m", "node")


class Machine:
    """A directory to run commands in, with a home and the tiny models, and what still runs there."""

    def __init__(self, directory: Path, **environ: str) -> None:
        """``environ`` is added to this process's environment."""
        self.directory = directory
        models = read_environment().places.models
        models.mkdir(parents=True, exist_ok=True)
        (directory / "home").mkdir(parents=True)
        (directory / "home" / "models").symlink_to(models)
        self.environ = {**os.environ, "GRPO_HOME": str(directory / "home"), **environ}
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with (self.directory / f"{len(self.running)}.log").open("w") as log:
            process = subprocess.Popen(
                [*COMMAND, *arguments],
                cwd=self.directory,
                env=self.environ,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.running.append(process)
        return process

    def run(self, *arguments: str) -> str:
        """What a command prints. Fails unless it succeeds."""
        done = subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.directory,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.directory.glob("*.log")))

    def close(self) -> None:
        """End what still runs."""
        for process in self.running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
