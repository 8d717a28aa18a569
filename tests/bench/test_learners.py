"""The learners' bench on a few steps: several learners share a run under virtual time, and it repeats."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from bench.emulation.arm import Arm, Result, groups_of_one, level_at, run_arm
from bench.learners import ARMS, stored


def test_two_learners_share_a_run_and_the_same_seed_gives_the_same_curve():
    arm = Arm("two", learners=2)
    first, again = (run_arm(arm, 0, 4, problems=16) for _ in range(2))
    assert first.curve == again.curve
    assert first.steps >= 3, "both have made steps"
    assert first.curve[-1][1] >= 2 * arm.groups_per_update
    assert 0 <= first.curve[-1][3] <= 1


def test_a_weight_reaches_the_policy():
    """After the same steps the version is the sum of the weights."""
    summed, shared = (run_arm(Arm("x", learners=2, weight=w), 0, 4, problems=16) for w in (1.0, 0.5))
    assert summed.curve[-1][2] == 2 * shared.curve[-1][2] > 0


def test_arms_have_names_of_their_own():
    assert len({arm.name for arm in ARMS}) == len(ARMS)


def test_results_are_read_back_and_a_line_that_was_cut_off_is_not(tmp_path: Path):
    result = Result(asdict(ARMS[0]), 0, 2, [(0.0, 0, 0.0, 0.2), (2.0, 16, 2.0, 0.4)], 2, {}, 0, 0.0, 0.0)
    line = json.dumps(asdict(result))
    file = tmp_path / "results.jsonl"
    file.write_text(f"{line}\n{line[:40]}\n")
    (read,) = stored(file)
    assert read.is_of(ARMS[0], 0, 2)
    assert level_at(read, 0, 2.0) > 0.3
    assert groups_of_one(read.arm, 2) == 0.9 * 2 * ARMS[0].groups_per_update
