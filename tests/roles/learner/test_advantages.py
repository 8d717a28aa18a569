"""Advantages: the numbers of TRL (1.16) and the faults of the field."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.runspec import AdvantageSpec
from roles.learner.advantages import group_advantages

UNSCALED = AdvantageSpec()
STD = AdvantageSpec(advantage_scale="std")


def a_std(**changes) -> AdvantageSpec:
    return AdvantageSpec.model_validate({"advantage_scale": "std", **changes})


TRL = {
    (1, 0, 0, 0): ([1.49970006] + [-0.49990002] * 3, [1.73205077] + [-0.57735026] * 3, [0.75] + [-0.25] * 3),
    (1, 0, 0, 1): (
        [0.86587543, -0.86587543, -0.86587543, 0.86587543],
        [1, -1, -1, 1],
        [0.5, -0.5, -0.5, 0.5],
    ),
    (1, 1, 1, 1): ([0] * 4, [0] * 4, [0] * 4),
    (1, 0, None, 0): (
        [1.15450057, -0.57725029, 0, -0.57725029],
        [1.41421353, -0.70710677, 0, -0.70710677],
        [0.66666667, -0.33333333, 0, -0.33333333],
    ),
    (None, 2, None, None): ([0] * 4, [0] * 4, [0] * 4),
    (0.2, 0.5, 0.9, 1.4): (
        [-1.05827183, -0.48103265, 0.28861959, 1.25068489],
        [-1.2222222, -0.55555554, 0.33333333, 1.44444441],
        [-0.55, -0.25, 0.15, 0.65],
    ),
}


@pytest.mark.parametrize("rewards", TRL)
def test_advantages_equal_those_of_trl_in_all_three_forms(rewards):
    synchronous, asynchronous, unscaled = TRL[rewards]
    # TRL computes in fp32, hence the tolerance.
    population = a_std(advantage_ddof=0, advantage_epsilon=1e-8)
    assert group_advantages(rewards, STD).values == pytest.approx(synchronous, abs=2e-7)
    assert group_advantages(rewards, population).values == pytest.approx(asynchronous, abs=2e-7)
    assert group_advantages(rewards, UNSCALED).values == pytest.approx(unscaled, abs=1e-8)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-4])
@pytest.mark.parametrize(("reward", "count"), [(0.9, 7), (0.4, 7), (0.6, 6), (1.0, 8)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_group_with_equal_rewards_has_advantages_of_exactly_zero(reward, count, epsilon, dtype):
    group = group_advantages(list(np.full(count, reward, dtype)), a_std(advantage_epsilon=epsilon))
    assert group.values.tolist() == [0.0] * count
    assert group.zero_spread


def test_rewards_that_differ_by_rounding_alone_are_equal():
    assert group_advantages([0.1 + 0.2, 0.3, 0.3], a_std(advantage_epsilon=1e-20)).zero_spread


def test_a_small_but_real_difference_counts():
    assert not group_advantages([0.3, 0.3001], STD).zero_spread


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "std"])
def test_a_group_of_one_has_advantage_zero_and_never_nan(scale, baseline):
    group = group_advantages([1.0], a_std(advantage_scale=scale, advantage_baseline=baseline))
    assert group.values.tolist() == [0.0]
    assert group.zero_spread


def test_a_group_that_nobody_could_score_has_advantage_zero():
    assert group_advantages([None, None], STD).values.tolist() == [0.0, 0.0]


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")], UNSCALED)


def test_a_baseline_of_the_others_leaves_each_reward_out_of_its_own():
    group = group_advantages([1.0, 0.0, None, 0.5], AdvantageSpec(advantage_baseline="leave_one_out"))
    assert group.values == pytest.approx([1 - 0.25, 0 - 0.75, 0, 0.5 - 0.5])


def test_advantages_follow_group_and_index_and_not_the_order_of_arrival():
    arrivals = [
        ("g1", 0, 1),
        ("g2", 0, 0),
        ("g1", 1, 0),
        ("g2", 1, 0),
        ("g1", 0, 1),
    ]  # the fifth is a duplicate
    arrivals += [("g2", 2, 1), ("g1", 2, 1), ("g2", 3, 0), ("g1", 3, 0)]
    groups: dict[str, dict[int, float]] = {"g1": {}, "g2": {}}
    for group, index, reward in arrivals:
        groups[group].setdefault(index, reward)
    first, second = ([rewards[i] for i in range(4)] for rewards in groups.values())
    assert group_advantages(first, STD).values == pytest.approx([0.8658754, -0.8658754] * 2, abs=1e-7)
    assert group_advantages(second, STD).values == pytest.approx(
        [-0.4999, -0.4999, 1.4997, -0.4999], abs=1e-5
    )
