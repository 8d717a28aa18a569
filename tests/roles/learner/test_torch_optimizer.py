"""AdamW over the factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from protocol.learner_spec import LearnerSpec
from roles.learner.torch_optimizer import FactorOptimizer

SPEC = LearnerSpec(beta2=0.999, grad_norm_max=10.0)


def moved(optimizer: FactorOptimizer, factor: Parameter, gradient: float, rate: float = 1e-3) -> float:
    """By how many learning rates one step moves the factor."""
    before = factor.item()
    factor.grad = torch.tensor([gradient])
    optimizer.step(rate)
    return (factor.item() - before) / rate


def test_a_restored_optimizer_moves_as_if_it_had_never_stopped():
    factor = Parameter(torch.zeros(1))
    optimizer = FactorOptimizer({"a": factor}, SPEC)
    for _ in range(3):
        assert moved(optimizer, factor, 1.0) == pytest.approx(-1.0, abs=1e-3)
    restarted = FactorOptimizer({"a": factor}, SPEC)
    restarted.restore(optimizer.state().result())
    assert moved(restarted, factor, -1.0) == pytest.approx(-0.4184356, abs=1e-4)


def test_an_optimizer_that_lost_its_state_moves_the_other_way():
    factor = Parameter(torch.zeros(1))
    assert moved(FactorOptimizer({"a": factor}, SPEC), factor, -1.0) == pytest.approx(1.0, abs=1e-4)


def test_the_gradient_is_clipped_and_its_norm_before_that_is_returned():
    factor = Parameter(torch.zeros(2))
    optimizer = FactorOptimizer({"a": factor}, LearnerSpec(grad_norm_max=1.0))
    factor.grad = torch.tensor([30.0, 40.0])
    assert optimizer.step(1e-3) == pytest.approx(50.0)
    assert optimizer.state().result()["a.exp_avg"] == pytest.approx([0.06, 0.08], rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    factor = Parameter(torch.ones(1))
    optimizer = FactorOptimizer({"a": factor}, SPEC)
    factor.grad = torch.tensor([bad])
    assert optimizer.step(1e-3) is None
    assert factor.item() == 1.0
    assert optimizer.state().result() == {}


def test_the_state_before_the_first_step_is_empty_and_restores_to_that():
    factor = Parameter(torch.zeros(1))
    optimizer = FactorOptimizer({"a": factor}, SPEC)
    nothing = optimizer.state().result()
    moved(optimizer, factor, 1.0)
    optimizer.restore(nothing)
    assert optimizer.state().result() == {}


def test_a_state_is_a_copy():
    factor = Parameter(torch.zeros(1))
    optimizer = FactorOptimizer({"a": factor}, SPEC)
    moved(optimizer, factor, 1.0)
    state = optimizer.state().result()
    moved(optimizer, factor, 1.0)
    assert state["a.step"] == 1
    optimizer.restore(state)
    moved(optimizer, factor, 1.0)
    assert state["a.step"] == 1


def test_a_step_waits_for_the_copy_that_is_still_being_made():
    factor = Parameter(torch.zeros(4_000_000))
    optimizer = FactorOptimizer({"a": factor}, LearnerSpec(grad_norm_max=1e9))
    factor.grad = torch.ones_like(factor)
    for steps in range(1, 4):
        optimizer.step(1e-3)
        copying = optimizer.state()
        optimizer.step(1e-3)
        state = copying.result()
        optimizer.restore(state)
        assert state["a.step"] == steps
        assert np.abs(state["a.exp_avg"].astype(np.float64) - (1 - 0.9**steps)).max() < 1e-5


def test_the_state_of_other_factors_is_refused():
    optimizer = FactorOptimizer({"a": Parameter(torch.zeros(1))}, SPEC)
    with pytest.raises(ValueError, match="other factors"):
        optimizer.restore({"b.step": np.ones(1, np.float32)})
