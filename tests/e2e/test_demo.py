"""``grpo-node demo``: the first thing a person runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

WANTED = {
    "reward_first",
    "reward_last",
    "eval_first",
    "eval_last",
    "updates",
    "groups_trained",
    "groups_dropped",
    "groups_trained_twice",
    "staleness_max",
    "killed",
    "wall_s",
    "adapter",
}


def run_demo(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node", "demo", "--dir", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One demo with a seed of its own, and what it printed last."""
    done = run_demo(tmp_path_factory.mktemp("demo"), "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_demo_learns_although_a_sampler_is_killed(demo):
    assert demo.keys() >= WANTED
    assert demo["killed"] == ["sampler-1"]
    assert demo["eval_first"] <= 0.4
    assert demo["eval_last"] >= 0.9
    assert demo["reward_last"] > demo["reward_first"] + 0.4


def test_demo_trains_each_group_once_and_none_that_is_too_stale(demo):
    assert demo["groups_trained_twice"] == 0
    assert demo["staleness_max"] <= 4
    assert demo["groups_trained"] >= 16 * demo["updates"]


def test_fresh_groups_have_an_importance_ratio_of_one(demo):
    assert 0 < demo["ratio_deviation_max"] < 1e-4


def test_publishing_does_not_hold_up_the_step(demo):
    assert demo["blocked_share"] < 0.01


def test_demo_leaves_an_adapter_that_peft_loads_and_a_picture(demo):
    adapter = Path(demo["adapter"])
    weights = load_file(adapter / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    assert Path(demo["picture"]).read_bytes().startswith(b"\x89PNG")
    command = [sys.executable, "-m", "node", "adapters", "try", str(adapter), "4213>", "--temperature", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "1234" in done.stdout.splitlines()[-1].split()[-1]
