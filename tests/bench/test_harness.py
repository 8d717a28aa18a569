"""The harness: goals that can be missed, and a last line that a program can read."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys

import pytest

from bench.harness import Goal, machine, report


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal("x", 1.0, at_most=1.0), True),
        (Goal("x", 1.1, at_most=1.0), False),
        (Goal("x", 0.9, at_least=0.9), True),
        (Goal("x", 0.8, at_least=0.9), False),
        (Goal("x", 1.0, at_least=0.9, at_most=1.1), True),
        (Goal("x", 1.2, at_least=0.9, at_most=1.1), False),
        (Goal("x", math.nan, at_most=1.0), False),
    ],
)
def test_a_goal_is_met_within_its_bounds(goal: Goal, met: bool):
    assert goal.met is met


def test_a_goal_that_cannot_be_missed_is_none():
    with pytest.raises(ValueError, match="no bound"):
        Goal("x", 1.0)


def test_the_last_line_is_json_with_figures_goals_and_machine(capsys: pytest.CaptureFixture[str]):
    report({"a": 1.5, "lost": math.nan}, [Goal("a", 1.5, at_most=1)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["figures"] == {"a": 1.5, "lost": "nan"}
    assert result["goals"] == [{"name": "a", "value": 1.5, "goal": "<= 1", "met": False}]
    assert result["machine"]["cores"] > 0


def test_the_machine_is_described_without_its_name():
    text = json.dumps(machine())
    assert platform.node() not in text


def test_with_json_only_one_line_is_printed():
    command = [sys.executable, "-m", "bench.codec", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["bench"] == "codec"
    assert result["figures"]["8x512/frame_bytes"] < 36_000


def test_benches_are_listed_with_what_they_ask():
    command = [sys.executable, "-m", "bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "What does a frame cost" in done.stdout
