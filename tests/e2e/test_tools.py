"""A run with an environment and a tool, as a person starts it on several machines."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.machine import Machine
from tests.roles.environments import FOLDER
from tests.roles.turns.calculator import save_calculator

pytest.importorskip(
    "verifiers.v1", reason="the verifiers library is not installed: pip install '.[verifiers]'"
)

UPDATES = 2
RUN_FILE = f"""
name = "sums"
[model]
ref = "model"
[lora]
rank = 4
alpha = 8
[tasks]
source = "verifiers:calculators"
rows_max = 40
held_out = 4
[tasks.arguments]
below = 4
[[rewards]]
name = "verifiers:calculators"
timeout_s = 30.0
[tools]
functions = ["sum_tools:add"]
turns_max = 3
[sampling]
group_size = 4
max_new_tokens = 150
[learner]
updates = {UPDATES}
groups_per_update = 2
learning_rate = 1e-4
[eval]
problems = 0
[store]
url = "store"
"""

TOOL = '''
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b
'''


ALLOWED = ("--allow-module", "sum_tools")


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of the run: what was printed and logged, and how it stood at last."""

    created: str
    refused_with: int
    refusal: str
    events: dict[str, list[dict[str, Any]]]
    """What nodes logged, by name, the run's own events among them."""
    status: dict[str, Any]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    machine = Machine(tmp_path_factory.mktemp("sums") / "machine")
    try:
        created = broker_and_run(machine)
        refused = join(machine, "sampler")
        nodes = [
            join(machine, "learner", "--allow-module", "calculators"),
            join(machine, "verifier", "--allow-module", "calculators"),
            join(machine, "sampler", *ALLOWED, "--name", "calculating"),
        ]
        refused_with = refused.wait(60)
        assert [node.wait(90) for node in nodes] == [0, 0, 0], machine.logs()
        status = json.loads(machine.run("status", "sums", "--json"))
        _, refusal, *logs = (path.read_text() for path in sorted(machine.directory.glob("*.log")))
        yield Ended(created, refused_with, refusal, events_in(logs), status)
    finally:
        machine.close()


def broker_and_run(machine: Machine) -> str:
    """A run file with its environment, tool and model beside it, and a broker; what ``create`` prints."""
    shutil.copy(FOLDER / "calculators.py", machine.directory)
    (machine.directory / "sum_tools.py").write_text(TOOL)
    (machine.directory / "run.toml").write_text(RUN_FILE)
    broker = machine.start("broker", "--dir", "broker")
    save_calculator(machine.directory / "model")
    assert broker.stdout is not None
    lines = [broker.stdout.readline(), broker.stdout.readline()]
    found = re.search(r"GRPO_BROKER=(\S+) GRPO_TOKEN=(\S+)", lines[1])
    assert found, lines
    machine.environ |= {"GRPO_BROKER": found[1], "GRPO_TOKEN": found[2]}
    return machine.run("create", "run.toml")


def join(machine: Machine, role: str, *options: str) -> subprocess.Popen[str]:
    return machine.start("--role", role, "--run", "sums", "--threads", "1", "--log", "info", *options)


def events_in(logs: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for log in logs:
        for line in log.splitlines():
            said = json.loads(line)
            found.setdefault(said["event"], []).append(said)
    return found


def test_a_sampler_that_was_not_told_to_trust_the_tool_is_refused_in_one_line(ended: Ended):
    assert ended.refused_with == 2
    assert ended.refusal == (
        "grpo-node: a tool of this run is code of module 'sum_tools'; if you trust it, start the sampler "
        "with --allow-module sum_tools\n"
    )


def test_create_says_what_a_sampler_must_trust(ended: Ended):
    assert ended.created.endswith(f"{' '.join(ALLOWED)}\n")


def test_what_is_trained_are_conversations_that_the_environment_scored(ended: Ended):
    steps, verified = ended.events["step_trained"], ended.events["group_verified"]
    assert len(steps) == UPDATES
    assert all(step["updated"] for step in steps)
    assert max(step["rollout/turns_mean"] for step in steps) > 1.5, "most rollouts call the tool"
    assert max(group["reward_mean"] for group in verified) > 1.0, "the calculator was asked, and seen to be"
    assert sum(group["unscorable"] for group in verified) == 0


def test_every_group_is_accounted_for(ended: Ended):
    status = ended.status
    assert status["finished"]
    assert status["groups_trained"] == 2 * UPDATES
    accounted = status["groups_trained"] + sum(status["groups_dropped"].values()) + status["groups_dead"]
    assert status["groups_issued"] == accounted + sum(status["in_flight"].values())
