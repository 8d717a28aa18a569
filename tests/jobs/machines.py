"""Machines for the stand-in: what a job should run really runs, as a process on this machine.

Where the Hub gives every job a network of its own, here all share the loopback. So the names and ports that
jobs of one group know each other by are replaced, as the group's name server would.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.settings import read_environment
from tests.jobs.standin import StandIn

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machines:
    """One process a job; its output is the job's log, its end the job's end."""

    def __init__(self, hub: StandIn, directory: Path) -> None:
        self.hub = hub
        self.directory = directory
        self.port = free_port()
        self.websocket = free_port()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._news = threading.Condition()
        self._watchers: list[threading.Thread] = []
        hub.on_start = self._start
        hub.on_cancel = lambda job: self._running[job["id"]].terminate()

    def wait_for(self, holds: Callable[[], bool], seconds: float = 400.0) -> None:
        """Until it holds, looked at after each line of a log and each end of a job."""
        with self._news:
            assert self._news.wait_for(holds, seconds), self.told()

    def lines(self, slot: str, word: str) -> list[str]:
        """Lines of all jobs of a slot in which a word stands."""
        ids = [job["id"] for job in self.hub.jobs.values() if job["labels"]["grpo-slot"] == slot]
        return [line for identifier in ids for line in self.hub.logs[identifier] if word in line]

    def kill(self, slot: str) -> None:
        """Take a slot's machine away, as whoever pays more for it would."""
        live = next(
            job
            for job in reversed(self.hub.jobs.values())
            if job["labels"]["grpo-slot"] == slot and self._running[job["id"]].poll() is None
        )
        # The shell has become the node, and the node's children die with it.
        self._running[live["id"]].kill()

    def told(self) -> str:
        """The end of every log."""
        ends = {job["labels"]["name"]: self.hub.logs[job["id"]][-15:] for job in self.hub.jobs.values()}
        return "\n".join(f"--- {name}\n" + "\n".join(end) for name, end in ends.items())

    def close(self) -> None:
        """End what still runs."""
        self.hub.on_start = None
        for process in self._running.values():
            process.kill()
        for watcher in self._watchers:
            watcher.join(10)

    def _start(self, job: dict[str, Any], body: dict[str, Any]) -> None:
        place = self.directory / job["id"]
        models = read_environment().places.models
        models.mkdir(parents=True, exist_ok=True)
        (place / "home").mkdir(parents=True)
        (place / "home" / "models").symlink_to(models)
        *shell, text = body["command"]
        text = text.replace("${HF_NETWORK_GROUP_PREFIX}broker:4222", f"127.0.0.1:{self.port}")
        text = text.replace("--port 4222", f"--port {self.port}")
        text = text.replace("--websocket 8000", f"--websocket {self.websocket}")
        environ = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GRPO_HOME": str(place / "home"),
            "JOB_ID": job["id"],
            **body["environment"],
            **body["secrets"],
        }
        process = subprocess.Popen(
            [*shell, text],
            cwd=place,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._running[job["id"]] = process
        watcher = threading.Thread(target=self._watch, args=(job, process), daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def _watch(self, job: dict[str, Any], process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._news:
                self.hub.logs[job["id"]].append(line.rstrip("\n"))
                self._news.notify_all()
        code = process.wait()
        process.stdout.close()
        with self._news:
            if job["status"]["stage"] == "RUNNING":
                stage, message = ("COMPLETED", None) if code == 0 else ("ERROR", f"exit code {code}")
                self.hub.finish(job, stage, message)
            self._news.notify_all()
