"""The reward curve as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.plot import save_curve

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("rewards", [[], [0.5], [0.1 * i for i in range(50)]])
@pytest.mark.parametrize("evals", [[], [(4.0, 0.25), (8.0, 0.75)]])
def test_any_curve_becomes_a_picture(tmp_path: Path, rewards: list[float], evals: list[tuple[float, float]]):
    path = save_curve(tmp_path / "curve.png", rewards, evals, "reward")
    assert path == tmp_path / "curve.png"
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize(("one", "other"), [([2.0, 3.0], [3.0, 2.0]), ([-2.0, -1.0], [-1.0, -2.0])])
def test_rewards_outside_zero_to_one_are_seen(tmp_path: Path, one: list[float], other: list[float]):
    pictures = [save_curve(tmp_path / "curve.png", curve, [], "r").read_bytes() for curve in (one, other)]
    assert pictures[0] != pictures[1]
