"""Nodes as a person starts them on several machines: a broker, a run, and one command a role."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machine import Machine

RUN_FILE = """
name = "sorting"
rewards = [{ name = "exact" }]
[model]
ref = "builtin:tiny"
[lora]
rank = 4
alpha = 8
[tasks]
source = "builtin:sort-digits"
template = "{prompt}"
[sampling]
max_new_tokens = 5
ack_wait_s = 6
[learner]
updates = 100000
learning_rate = 3e-3
[eval]
problems = 0
[store]
url = "store"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def status_until(machine: Machine, holds: Callable[[Any], bool], seconds: float = 90.0) -> Any:
    """Ask ``grpo-node status`` until ``holds``: what a person does too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = json.loads(machine.run("status", "sorting", "--json"))
        if holds(status):
            return status
    raise AssertionError(f"{status}\n{machine.logs()}")


def join(machine: Machine, role: str, *options: str) -> subprocess.Popen[str]:
    return machine.start("--role", role, "--run", "sorting", "--threads", "1", *options)


def start_broker_and_run(machine: Machine) -> None:
    broker = machine.start("broker", "--dir", "broker")
    assert broker.stdout is not None
    lines = [broker.stdout.readline(), broker.stdout.readline()]
    found = re.search(r"GRPO_BROKER=(\S+) GRPO_TOKEN=(\S+)", lines[1])
    assert found, lines
    machine.environ |= {"GRPO_BROKER": found[1], "GRPO_TOKEN": found[2]}
    (machine.directory / "run.toml").write_text(RUN_FILE)
    assert "created" in machine.run("create", "run.toml")
    assert "there already" in machine.run("create", "run.toml")


def alive(status: dict[str, Any]) -> Sequence[str]:
    return [role for peer in status["peers"] for role in peer["roles"]]


def test_nodes_join_by_one_command_and_drain_when_they_are_stopped(machine: Machine):
    start_broker_and_run(machine)
    everything = join(machine, "learner", "--role", "sampler", "--role", "verifier")
    status = status_until(machine, lambda s: s["version"] >= 3)
    assert set(alive(status)) == {"learner", "sampler", "verifier"}

    sampler = join(machine, "sampler")
    status_until(machine, lambda s: alive(s).count("sampler") == 2)
    sampler.send_signal(signal.SIGTERM)
    assert sampler.wait(30) == 0
    status = status_until(machine, lambda s: alive(s).count("sampler") == 1)

    # The books balance at rest: every issued group is trained, dropped, dead, or still in flight.
    everything.send_signal(signal.SIGINT)
    assert everything.wait(40) == 0
    status = status_until(machine, lambda s: not s["peers"])
    accounted = status["groups_trained"] + sum(status["groups_dropped"].values()) + status["groups_dead"]
    assert status["groups_issued"] == accounted + sum(status["in_flight"].values())


@pytest.mark.release
def test_nodes_go_on_where_they_stopped_and_a_second_signal_waits_for_nothing(machine: Machine):
    start_broker_and_run(machine)
    everything = join(machine, "learner", "--role", "sampler", "--role", "verifier")
    status_until(machine, lambda s: s["version"] >= 1)
    everything.send_signal(signal.SIGINT)
    assert everything.wait(40) == 0
    status = status_until(machine, lambda s: not s["peers"])
    again = join(machine, "learner", "--role", "sampler", "--role", "verifier")
    status_until(machine, lambda s: s["version"] > status["version"])
    again.send_signal(signal.SIGTERM)
    again.send_signal(signal.SIGINT)
    assert again.wait(5) == 130  # the second signal does not wait for anything


def test_second_learner_of_the_same_name_is_refused(machine: Machine):
    start_broker_and_run(machine)
    join(machine, "learner", "--name", "the-learner", "--role", "sampler", "--role", "verifier")
    status_until(machine, lambda s: s["version"] >= 1)
    second = join(machine, "learner", "--name", "the-learner")
    assert second.wait(60) == 2
    assert "already runs here; choose another --name" in machine.logs()


def test_node_whose_answers_differ_does_not_join(machine: Machine):
    start_broker_and_run(machine)
    (machine.directory / "rows.jsonl").write_text(
        '{"prompt": "1>", "answer": "1"}\n{"prompt": "2>", "answer": "2"}\n'
    )
    text = RUN_FILE.replace("builtin:sort-digits", "rows.jsonl").replace("sorting", "rows")
    (machine.directory / "rows.toml").write_text(text.replace('"{prompt}"', '"{prompt}"\nheld_out = 1'))
    machine.run("create", "rows.toml")
    (machine.directory / "rows.jsonl").write_text(
        '{"prompt": "1>", "answer": "7"}\n{"prompt": "2>", "answer": "2"}\n'
    )
    verifier = machine.start("--role", "verifier", "--run", "rows")
    assert verifier.wait(60) == 2
    assert "is not what the run was created with" in machine.logs()
