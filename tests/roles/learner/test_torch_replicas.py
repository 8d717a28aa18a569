"""Rows dealt out among replicas: the same loss and gradient as one device, whatever falls to whom."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from roles.learner.policy import Sample
from roles.learner.torch_adapter import causal_model, open_adapter
from roles.learner.torch_loss import StepTotals, TokenBatch, loss_contribution
from roles.learner.torch_replicas import Replicas, deal, deal_prompts
from tests.roles.learner.tiny_llama import a_spec, gradient_of, some_samples

SPEC = a_spec({"aggregation": "sequence"})
CPU = torch.device("cpu")


@pytest.fixture
def open_replicas(model_dir):
    opened: list[Replicas] = []

    def open_on(count: int) -> Replicas:
        torch.manual_seed(count)  # PEFT's own first factors differ, and are overwritten by the first's
        replicas = Replicas([open_adapter(model_dir, SPEC.model, SPEC.lora, CPU) for _ in range(count)])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for factor in replicas.factors.values():
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
        replicas.spread()
        opened.append(replicas)
        return replicas

    yield open_on
    for replicas in opened:
        replicas.close()


def share(replicas: Replicas, number: int, rows: list[Sample], totals: StepTotals) -> float:
    """Backward through one replica's rows, one at a time; its share of the step's loss."""
    model, loss = causal_model(replicas.models[number]), 0.0
    for row in rows:
        ids = torch.tensor([*row.prompt_token_ids.tolist(), *row.token_ids.tolist()])
        logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1].float(), -1)
        own = logprobs.gather(-1, ids[1:, None])[-len(row.token_ids) :, 0]
        batch = TokenBatch(
            own,
            torch.from_numpy(row.sampler_logprobs),
            torch.zeros(len(row.token_ids), dtype=torch.int64),
            torch.tensor([row.advantage]),
            torch.zeros(len(row.token_ids)),
        )
        contribution = loss_contribution(batch, SPEC.loss, totals)
        contribution.backward()
        loss += float(contribution.detach())
    return loss


def step(replicas: Replicas, samples: list[Sample]) -> tuple[float, torch.Tensor]:
    """The loss and the gathered gradient of a whole step."""
    totals = StepTotals(sum(len(s.token_ids) for s in samples), len(samples))
    hands = deal([len(s.prompt_token_ids) + len(s.token_ids) for s in samples], len(replicas))
    replicas.zero_gradients()
    shares = replicas.each(lambda i: share(replicas, i, [samples[row] for row in hands[i]], totals))
    replicas.gather()
    return sum(shares), torch.cat([gradient_of(f).flatten() for f in replicas.factors.values()])


# --- dealing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "hands", "dealt"),
    [
        ([5, 4, 3, 3, 3], 2, [[0, 3], [1, 2, 4]]),
        ([1, 1, 1, 9], 2, [[3], [0, 1, 2]]),
        ([7], 3, [[0], [], []]),
        ([], 2, [[], []]),
        ([2, 9, 4], 1, [[0, 1, 2]]),
    ],
)
def test_rows_are_dealt_out_by_their_tokens(costs, hands, dealt):
    assert deal(costs, hands) == dealt


def test_every_row_is_dealt_once_and_no_device_has_a_third_too_much():
    costs = [(i * 37) % 101 + 1 for i in range(64)]
    hands = deal(costs, 4)
    assert sorted(row for hand in hands for row in hand) == list(range(64))
    assert max(sum(costs[row] for row in hand) for hand in hands) <= 4 / 3 * sum(costs) / 4


def test_samples_of_one_prompt_stay_together():
    first, second, third = (sample.prompt_token_ids for sample in some_samples(3))
    samples = [
        replace(sample, prompt_token_ids=prompt)
        for sample, prompt in zip(some_samples(5), (first, second, first, third, second), strict=True)
    ]
    hands = deal_prompts(samples, 2)
    assert sorted(index for hand in hands for index in hand) == [0, 1, 2, 3, 4]
    assert any({0, 2} <= set(hand) for hand in hands)
    assert any({1, 4} <= set(hand) for hand in hands)


# --- a step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_several_devices_give_the_loss_and_the_gradient_of_one(open_replicas, count):
    samples = some_samples(7)
    loss, gradient = step(open_replicas(1), samples)
    dealt_loss, dealt_gradient = step(open_replicas(count), samples)
    assert gradient.abs().max() > 1e-3
    assert dealt_loss == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(dealt_gradient, gradient, atol=1e-6, rtol=1e-5)


def test_a_step_on_several_devices_repeats_bit_for_bit(open_replicas):
    replicas, samples = open_replicas(3), some_samples(7)
    first, second = step(replicas, samples), step(replicas, samples)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


def test_a_device_without_rows_adds_nothing(open_replicas):
    samples = some_samples(1)
    assert torch.equal(step(open_replicas(3), samples)[1], step(open_replicas(1), samples)[1])


def test_rows_that_fall_to_the_others_alone_still_count(open_replicas):
    replicas, samples = open_replicas(2), some_samples(2)
    replicas.zero_gradients()
    totals = StepTotals(sum(len(s.token_ids) for s in samples), 2)
    replicas.each(lambda i: share(replicas, i, samples if i else [], totals))
    replicas.gather()
    gathered = torch.cat([gradient_of(f).flatten() for f in replicas.factors.values()])
    assert torch.equal(gathered, step(open_replicas(1), samples)[1])


def test_after_an_optimizer_step_all_replicas_hold_the_first_ones_factors(open_replicas):
    replicas = open_replicas(3)
    step(replicas, some_samples(4))
    torch.optim.SGD(replicas.factors.values(), lr=1.0).step()
    replicas.spread()
    first, *others = (
        torch.cat([p.flatten() for p in model.parameters() if p.requires_grad]) for model in replicas.models
    )
    assert all(torch.equal(first, other) for other in others)


def test_devices_work_at_the_same_time(open_replicas):
    replicas = open_replicas(2)
    barrier = threading.Barrier(2, timeout=30)
    assert sorted(replicas.each(lambda i: barrier.wait() * 0 + i)) == [0, 1]


def test_a_failing_device_is_raised_after_all_have_ended(open_replicas):
    replicas, ended = open_replicas(2), threading.Event()

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("no room")
        ended.set()

    with pytest.raises(ValueError, match="no room"):
        replicas.each(work)
    assert ended.is_set()
