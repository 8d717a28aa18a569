"""``bench.learner`` on a tiny model: its arms do the same step, and it says what it found."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from bench.learner import figures_of, goals, must_agree
from bench.steps.arm import ArmResult
from bench.steps.batch import CASES, StepBatch, draw


def a_result(arm: str, step_s: float = 1.0, loss: float = 0.5, above: int = 100) -> ArmResult:
    """One process of one step."""
    return ArmResult(arm, "1", [step_s], [step_s], [loss], [2.0], loaded_bytes=1000, peak_bytes=1000 + above)


def test_the_quick_bench_measures_two_arms_that_agree():
    command = [sys.executable, "-m", "bench.learner", "--quick", "--cases", "quick_binary"]
    command += ["--rounds", "1", "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    figures = result["figures"]
    assert result["bench"] == "learner"
    assert result["goals"] == []
    assert "--trl-python" in done.stderr
    for arm in ("ours", "padded"):
        assert figures[f"quick_binary/{arm}/trained_tokens_per_s"] > 0
        assert figures[f"quick_binary/{arm}/memory_mib"] > 0
    norms = [figures[f"quick_binary/{arm}/grad_norm"] for arm in ("ours", "padded")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_batch_comes_back_from_its_file(tmp_path):
    batch = draw(CASES["quick"], vocabulary=40)
    batch.save(tmp_path / "batch.safetensors")
    again = StepBatch.load(tmp_path / "batch.safetensors")
    assert all(np.array_equal(getattr(batch, n), getattr(again, n)) for n in StepBatch.__slots__[:-1])


def test_every_row_has_an_advantage_but_for_the_binary_case_where_half_have_none():
    assert np.all(draw(CASES["mixed"], 40).advantages != 0)
    assert np.all(draw(CASES["long_prompt"], 40).advantages != 0)
    assert np.mean(draw(CASES["binary"], 40).advantages == 0) == 0.5


def test_arms_that_did_not_do_the_same_step_are_not_compared():
    with pytest.raises(SystemExit, match="differ in their loss"):
        must_agree("mixed", {"ours": [a_result("ours")], "trl": [a_result("trl", loss=0.51)]})


def test_arms_within_rounding_are_compared():
    must_agree("mixed", {"ours": [a_result("ours")], "trl": [a_result("trl", loss=0.50001)]})


def test_only_full_cases_have_goals_and_ratios_are_of_medians():
    batch = draw(CASES["quick"], 40)
    ours = [a_result("ours", step_s) for step_s in (1.0, 2.0, 9.0)]
    found = {"ours": ours, "trl": [a_result("trl", 6.0, above=400)]}
    figures = figures_of("mixed", batch, found) | figures_of("binary", batch, found)
    assert figures["mixed/speed_vs_trl"] == 3.0
    assert figures["mixed/memory_vs_trl"] == 0.25
    assert [(goal.name, goal.met) for goal in goals(figures)] == [
        ("speed_vs_trl", True),
        ("memory_vs_trl", True),
    ]
