"""A whole swarm of jobs trains: the stand-in runs what it is asked to, with a real broker on loopback."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.demo import demo_spec
from node.stores import open_store
from protocol.manifest import Manifest
from tests.jobs.machines import ROOT, Machines
from tests.jobs.standin import StandIn

pytestmark = [pytest.mark.e2e, pytest.mark.release, pytest.mark.timeout(900)]

UPDATES = 24
RUN_FILE = """
name = "demo"
rewards = [{{ name = "exact" }}]
[model]
ref = "builtin:tiny-0"
[lora]
rank = 4
alpha = 8
[tasks]
source = "builtin:sort-digits"
template = "{{prompt}}"
[sampling]
max_new_tokens = 5
ack_wait_s = 6
[learner]
updates = {updates}
learning_rate = 3e-3
state_every = 5
export_every = 0
[eval]
every = 0
problems = 8
[store]
url = "{store}"
"""


@pytest.fixture
def machines(hub: StandIn, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(hub, tmp_path / "machines")
    yield made
    made.close()


@pytest.fixture
def up(here: Path, tmp_path: Path) -> list[str]:
    """The command; the run's store is a bucket that is mounted on every job."""
    store = tmp_path / "bucket"
    (here / "run.toml").write_text(RUN_FILE.format(updates=UPDATES, store=store.as_uri()))
    mount = f"hf://buckets/alice/grpo:{store}:rw"
    command = [sys.executable, "-m", "node", "jobs", "up", "run.toml"]
    return [*command, "--install", "none", "--mount", mount, "--samplers", "2"]


async def updates_of(store: Path) -> list[Manifest]:
    opened = open_store(demo_spec(0, 10, store).store, store.parent / "cache")
    return [await opened.manifest(path) for path in await opened.list("demo/updates")]


def test_swarm_of_jobs_trains_though_learner_and_broker_are_taken_away(
    hub: StandIn, machines: Machines, here: Path, up: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    keeper = subprocess.Popen(
        [*up, "--keep", "--every", "1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        machines.wait_for(lambda: len(machines.lines("learner-1", '"update_committed"')) >= 4)
        machines.kill("learner-1")
        machines.wait_for(lambda: len(machines.lines("learner-1", '"update_committed"')) >= 8)
        machines.kill("broker")
        machines.wait_for(lambda: "COMPLETED" in hub.stages()["broker"])
        assert keeper.wait(200) == 0
    finally:
        keeper.kill()
        said = keeper.communicate()[0]
    assert "run demo is finished" in said, said + machines.told()
    assert hub.live() == []
    assert hub.stages() == {
        "broker": ["ERROR", "COMPLETED"],
        "learner-1": ["ERROR", "COMPLETED"],
        "sampler-1": ["COMPLETED"],
        "sampler-2": ["COMPLETED"],
        "verifier-1": ["COMPLETED"],
    }
    found = asyncio.run(updates_of(here / "bucket"))
    assert max(manifest.count for manifest in found) == UPDATES
    assert {manifest.author for manifest in found} == {"learner-1"}
    assert len({manifest.signer for manifest in found}) == 1
    rewards = [json.loads(line)["reward"] for line in machines.lines("learner-1", '"step_trained"')]
    assert sum(rewards[-6:]) > sum(rewards[:6])
