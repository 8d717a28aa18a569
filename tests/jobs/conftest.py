"""The stand-in, a run file, and ``grpo-node`` in a home of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session

from node.hub_jobs import THREADS
from node.job_plan import SwarmSpec
from node.job_templates import TEMPLATES
from node.runs import read_run_file
from tests.command import Command, command
from tests.jobs.standin import TOKEN, StandIn

RUN_FILE = """
name = "sums"
rewards = [{ name = "exact" }]
[model]
ref = "builtin:tiny"
[tasks]
source = "builtin:sort-digits"
template = "{prompt}"
[store]
url = "hf://buckets/alice/grpo"
"""


@pytest.fixture
def hub() -> Iterator[StandIn]:
    with StandIn() as standin:
        yield standin
        # Whoever was left without an answer gets one now, so that nothing of it reaches into the next test.
        standin.answer_all()
        for thread in threading.enumerate():
            if thread.name == THREADS:
                thread.join(10)
    close_session()  # the client keeps connections open, also those to a stand-in that is gone


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


@pytest.fixture
def swarm(run_file: Path) -> SwarmSpec:
    """The run on one job of each kind, from an image that has everything."""
    return SwarmSpec(
        namespace="alice",
        run="sums",
        spec_digest=read_run_file(run_file).digest,
        run_file=run_file.read_text(),
        templates={kind: t.model_copy(update={"install": "none"}) for kind, t in TEMPLATES.items()},
    )


@pytest.fixture
def here(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that is logged in to the stand-in and has launched nothing yet."""
    for name in ("GRPO_BROKER_KEYS", "GRPO_IDENTITY", "GRPO_JOBS_HF_TOKEN", "GRPO_JOBS_HF_READ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRPO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def jobs(here: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """``grpo-node jobs …``."""
    run = command(capfd)
    return lambda *arguments: run("jobs", *arguments)


@pytest.fixture
def up(jobs: Command, run_file: Path) -> Command:
    """``grpo-node jobs up RUNFILE --install none …``."""
    return lambda *arguments: jobs("up", str(run_file), "--install", "none", *arguments)
