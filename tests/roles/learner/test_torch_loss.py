"""The objective: golden numbers computed by TRL 1.16's own loss, and the faults of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protocol.runspec import LossSpec
from roles.learner.torch_loss import StepTotals, TokenBatch, kl_to_genesis, loss_contribution
from roles.learner.torch_loss_metrics import loss_metrics, ratio_deviation
from tests.roles.learner.tiny_llama import gradient_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl_golden.json").read_text())

SEQUENCE: dict[str, Any] = {"aggregation": "sequence"}
GSPO: dict[str, Any] = {"ratio_level": "sequence"}
CISPO: dict[str, Any] = {"detached_weight": True, "clip_low": 1.0}


def constant(tokens: int) -> dict[str, Any]:
    return {"aggregation": "constant", "aggregation_tokens": tokens}


def corrected(correction: str, cap: float) -> dict[str, Any]:
    return {"correction": correction, "correction_cap": cap}


EXPRESSED: dict[str, dict[str, Any]] = {
    "grpo": SEQUENCE,
    "grpo_clip_higher_0.28": SEQUENCE | {"clip_high": 0.28},
    "bnpo": {},
    "dapo": {},
    "dapo_ga2_spg2": {},
    "dapo_ga2_spg4": {},
    "dr_grpo_L4": constant(4),
    "dr_grpo_L8": constant(8),
    "cispo_eps_high5": CISPO | {"clip_high": 4.0},
    "cispo_eps_high1.28": CISPO | {"clip_high": 0.28},
    "gspo(seq,grpo)": SEQUENCE | GSPO,
    "gspo eps 3e-4/4e-4": SEQUENCE | GSPO | {"clip_low": 3e-4, "clip_high": 4e-4},
    "seq+dapo": GSPO,
    "luspo(seq)": GSPO | constant(1),
    "grpo_delta1.3": SEQUENCE | {"dual_clip": 1.3},
    "grpo_beta0.1_bias": SEQUENCE | {"kl_beta": 0.1, "kl_unbiased": True},
    "grpo_beta0.1_nobias": SEQUENCE | {"kl_beta": 0.1},
    "dapo_entcoef0.1": {"entropy_coef": 0.1},
    "grpo_opm0.0": SEQUENCE | corrected("negative_mask", 1.0),
    "dapo_token_truncate_cmax3.0": corrected("truncate", 3.0),
    "dapo_token_truncate_cmax2.0": corrected("truncate", 2.0),
    "dapo_token_mask_cmax3.0": corrected("mask", 3.0),
    "dapo_token_mask_cmax2.0": corrected("mask", 2.0),
    "dapo_sequence_truncate_cmax3.0": corrected("sequence_truncate", 3.0),
    "dapo_sequence_truncate_cmax2.0": corrected("sequence_truncate", 2.0),
    "dapo_sequence_mask_cmax3.0": corrected("sequence_mask", 3.0),
    "dapo_sequence_mask_cmax2.0": corrected("sequence_mask", 2.0),
}
"""TRL's cases as points of LossSpec."""

NOT_EXPRESSED = {
    "cispo_default_0.2": "a weight capped at 0.2: LossSpec's clip contains 1 by construction",
    "sapo": "a sigmoid gate in place of the clip",
    "vespo": "a gamma-shaped weight of the sequence ratio",
    "dapo_top_q0.5": "trains on the tokens of highest entropy only",
}
"""TRL's cases that LossSpec has no number for, and why."""

TOTALS = {"dapo_ga2_spg2": StepTotals(12, 4), "dapo_ga2_spg4": StepTotals(12, 4)}
"""Cases in which the fixture is one of two equal micro-batches of the step."""

METRIC_NAMES = {"cispo_clip_ratio": "clip_ratio/high_mean", "kl": "kl_genesis"}
"""TRL's names where ours differ."""

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)


def padded(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def fixture(spec: LossSpec) -> tuple[Tensor, TokenBatch]:
    """TRL's two rows of four; the paddings of 9 must never leak."""
    logprobs = padded([-1, -0.5, -2, -0.1], [-0.7, -1.2, -3, -3]).requires_grad_()
    old = logprobs.detach() - padded([0, 0.5, -0.5, 0.1], [0.3, -0.4, 9, -9])
    old_to_sampler = padded([0.1, -0.1, 0.2, 0], [1, 0.5, 9, -9])
    decoupled = spec.correction not in ("none", "negative_mask")
    batch = TokenBatch(
        learner_logprobs=logprobs[MASK],
        sampler_logprobs=(old - old_to_sampler if decoupled else old)[MASK],
        rows=torch.tensor([[0], [1]]).expand(2, 4)[MASK],
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        entropy=padded([0.2, 1.5, 2, 0.1], [0.9, 1.1, 5, 5])[MASK],
        genesis_logprobs=padded([-1.2, -0.4, -1, -0.3], [-0.9, -1, -1, -1])[MASK],
        proximal_logprobs=old[MASK],
    )
    return logprobs, batch


def a_batch(
    log_ratios: list[float], advantages: list[float], rows: list[int] | None = None
) -> tuple[Tensor, TokenBatch]:
    """Tokens at learner log-probability -1, by default one a row, with the given log-ratios."""
    logprobs = torch.full((len(log_ratios),), -1.0, requires_grad=True)
    batch = TokenBatch(
        learner_logprobs=logprobs,
        sampler_logprobs=logprobs.detach() - torch.tensor(log_ratios),
        rows=torch.tensor(rows or list(range(len(log_ratios)))),
        advantages=torch.tensor(advantages),
        entropy=torch.zeros(len(log_ratios)),
    )
    return logprobs, batch


def test_every_golden_case_is_either_expressed_or_excused():
    assert EXPRESSED.keys() | NOT_EXPRESSED.keys() == GOLDEN.keys()
    assert not EXPRESSED.keys() & NOT_EXPRESSED.keys()


@pytest.mark.parametrize("case", EXPRESSED)
def test_loss_gradient_and_metrics_equal_those_of_trl(case):
    spec = LossSpec(**EXPRESSED[case])
    logprobs, batch = fixture(spec)
    loss = loss_contribution(batch, spec, TOTALS.get(case, StepTotals(tokens=6, sequences=2)))
    loss.backward()
    assert loss.item() == pytest.approx(GOLDEN[case]["loss"], abs=1e-6)
    assert torch.allclose(gradient_of(logprobs), padded(*GOLDEN[case]["grad"]), atol=1e-6, rtol=0)
    metrics = loss_metrics(batch.detached(), spec)
    for name, value in GOLDEN[case]["metrics"].items():
        if name in {"policy_loss", "entropy_coef"}:
            continue  # a part of the loss and a setting, not metrics here
        assert metrics[METRIC_NAMES.get(name, name)] == pytest.approx(value, abs=1e-5), name


def test_ratio_and_kl_are_those_of_trl_for_the_asynchronous_trainer():
    metrics = loss_metrics(fixture(LossSpec())[1].detached(), LossSpec())
    assert metrics["ratio"] == pytest.approx(1.063434, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.063434, abs=1e-6)


@pytest.mark.parametrize("case", EXPRESSED)
def test_a_step_cut_into_micro_batches_has_the_same_loss_gradient_and_metrics(case):
    spec, totals = LossSpec(**EXPRESSED[case]), StepTotals(tokens=6, sequences=2)
    whole_logprobs, whole = fixture(spec)
    loss = loss_contribution(whole, spec, totals)
    loss.backward()
    logprobs, batch = fixture(spec)
    assert batch.genesis_logprobs is not None
    assert batch.proximal_logprobs is not None
    parts = []
    for row in (0, 1):
        chosen = batch.rows == row
        parts.append(
            TokenBatch(
                batch.learner_logprobs[chosen],
                batch.sampler_logprobs[chosen],
                torch.zeros_like(batch.rows[chosen]),
                batch.advantages[row : row + 1],
                batch.entropy[chosen],
                batch.genesis_logprobs[chosen],
                batch.proximal_logprobs[chosen],
            )
        )
    total = torch.stack([loss_contribution(part, spec, totals) for part in parts]).sum()
    total.backward()
    assert total.item() == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(gradient_of(logprobs), gradient_of(whole_logprobs), atol=1e-12, rtol=0)
    joined = TokenBatch.joined([part.detached() for part in parts])
    assert loss_metrics(joined, spec) == pytest.approx(loss_metrics(whole.detached(), spec), abs=1e-6)


def test_the_token_mean_is_over_the_step_and_not_over_micro_batches():
    totals = StepTotals(tokens=8, sequences=2)
    losses = [
        loss_contribution(a_batch([0.0] * 2, [-1.0], [0] * 2)[1], LossSpec(), totals),
        loss_contribution(a_batch([0.0] * 6, [0.0], [0] * 6)[1], LossSpec(), totals),
    ]
    assert torch.stack(losses).sum().item() == pytest.approx(0.25)


def test_an_overflowing_ratio_with_positive_advantage_is_clipped_without_gradient():
    logprobs, batch = a_batch([100.0], [1.0])
    loss = loss_contribution(batch, LossSpec(), StepTotals(1, 1))
    loss.backward()
    assert loss.item() == pytest.approx(-1.2)
    assert gradient_of(logprobs).tolist() == [0.0]


def test_an_overflowing_ratio_with_negative_advantage_is_capped_finite_and_counted():
    logprobs, batch = a_batch([100.0], [-1.0])
    loss = loss_contribution(batch, LossSpec(), StepTotals(1, 1))
    loss.backward()
    assert loss.item() == pytest.approx(485165195.4, rel=1e-6)
    assert torch.isfinite(gradient_of(logprobs)).all()
    metrics = loss_metrics(batch.detached(), LossSpec())
    assert metrics["ratio_capped_total"] == 1
    assert all(torch.isfinite(torch.tensor(list(metrics.values()))))


def test_dual_clip_bounds_the_same_token():
    _, batch = a_batch([100.0], [-1.0])
    assert loss_contribution(batch, LossSpec(dual_clip=4.0), StepTotals(1, 1)).item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    "correction", ["truncate", "mask", "sequence_truncate", "sequence_mask", "negative_mask"]
)
@pytest.mark.parametrize("detached", [True, False])
def test_no_correction_lets_an_overflow_through(correction, detached):
    logprobs, batch = a_batch([100.0, -100.0], [1.0, -1.0])
    spec = LossSpec(correction=correction, detached_weight=detached)
    loss = loss_contribution(batch, spec, StepTotals(2, 2))
    loss.backward()
    assert abs(loss.item()) < 10
    assert torch.isfinite(gradient_of(logprobs)).all()


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1.0, 1.5, -1.2), (1.0, 0.5, -0.5), (-1.0, 1.5, 1.5), (-1.0, 0.5, 0.8)],
)
def test_the_clip_is_pessimistic(advantage, ratio, expected):
    _, batch = a_batch([torch.tensor(ratio).log().item()], [advantage])
    assert loss_contribution(batch, LossSpec(), StepTotals(1, 1)).item() == pytest.approx(expected, abs=1e-6)


def kl_batch(learner: float, genesis: float) -> tuple[Tensor, TokenBatch]:
    logprobs = torch.tensor([learner], requires_grad=True)
    zeros = torch.zeros(1)
    batch = TokenBatch(
        logprobs, logprobs.detach(), torch.tensor([0]), zeros, zeros, genesis_logprobs=torch.tensor([genesis])
    )
    return logprobs, batch


def test_kl_is_k3_is_added_and_pulls_the_policy_back():
    logprobs, batch = kl_batch(-1.0, -2.0)
    k3 = kl_to_genesis(batch, torch.ones(1), LossSpec())
    k3.backward()
    assert k3.item() == pytest.approx(0.3678794)
    assert gradient_of(logprobs).item() == pytest.approx(0.6321206)
    assert loss_contribution(batch, LossSpec(kl_beta=0.1), StepTotals(1, 1)).item() == pytest.approx(
        0.0367879, abs=1e-7
    )


def test_kl_to_the_same_policy_is_exactly_zero_and_never_negative():
    assert kl_to_genesis(kl_batch(-1.0, -1.0)[1], torch.ones(1), LossSpec()).item() == 0.0
    for genesis in (-5.0, -1.5, -0.5, -0.001):
        assert kl_to_genesis(kl_batch(-1.0, genesis)[1], torch.ones(1), LossSpec()).item() > 0


def test_equal_policies_have_ratio_one_and_no_mismatch():
    metrics = loss_metrics(a_batch([0.0, 0.0], [1.0, -1.0])[1].detached(), LossSpec())
    assert metrics["ratio"] == 1.0
    assert metrics["sampling/importance_sampling_ratio/max"] == 1.0
    assert metrics["sampling/ess"] == 1.0


def test_mismatch_is_measured_before_it_is_truncated():
    spec = LossSpec(correction="truncate", correction_cap=2.0)
    metrics = loss_metrics(a_batch([3.0, 0.0], [1.0, 1.0])[1].detached(), spec)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(20.0855, abs=1e-3)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(3.0)


def test_only_rows_on_policy_enter_the_largest_deviation():
    _, batch = a_batch([0.5, 0.01], [1.0, 1.0])
    spec = LossSpec()
    assert ratio_deviation(batch.detached(), torch.tensor([False, True]), spec) == pytest.approx(
        0.01005, abs=1e-5
    )
    assert ratio_deviation(batch.detached(), torch.tensor([False, False]), spec) is None
