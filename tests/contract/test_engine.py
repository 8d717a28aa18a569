"""What every engine promises, asked alike of the fake, of transformers, and of vLLM, stub and real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from protocol.errors import EngineError
from protocol.messages import FinishReason, Rollout, SamplingParams
from roles.policy.compose import Factors
from roles.sampler.engine import Sampled
from tests.engine_rigs import (
    CONTEXT,
    EOS_IDS,
    VOCAB,
    Rig,
    a_request,
    some_factors,
)


@pytest.fixture(params=["fake", "transformers", "vllm-stub", pytest.param("vllm", marks=pytest.mark.vllm)])
async def bare(request, make_rig) -> AsyncIterator[Rig]:
    """A rig whose engine holds no policy."""
    rig = await make_rig(request.param)
    yield rig
    rig.release()
    await rig.engine.close()


@pytest.fixture
async def rig(bare):
    """A rig whose engine serves policy v1."""
    await bare.engine.load_policy("v1", some_factors(bare.shapes, 1), newest=True)
    return bare


def token_ids(sampled: Sampled) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in sampled.rollouts]


async def many_rollouts(rig: Rig, max_new_tokens: int) -> list[Rollout]:
    """Some two hundred, of several prompts."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    prompts = [[1, 5, 6, number] for number in range(9, 15)]
    requests = [a_request(prompt_token_ids=prompt, count=32, params=params) for prompt in prompts]
    groups = await asyncio.gather(*(rig.engine.sample(request) for request in requests))
    return [rollout for group in groups for rollout in group.rollouts]


async def test_rollouts_come_complete_and_in_order_of_index(rig):
    sampled = await rig.engine.sample(a_request(count=5))
    assert sampled.policy == "v1"
    assert [rollout.index for rollout in sampled.rollouts] == [0, 1, 2, 3, 4]


async def test_rollouts_of_a_group_have_streams_of_their_own(rig):
    sampled = await rig.engine.sample(a_request(count=8))
    assert len({tuple(ids) for ids in token_ids(sampled)}) > 5


async def test_the_same_seed_gives_the_same_rollouts_and_another_seed_others(rig):
    first, again, other = [await rig.engine.sample(a_request(seed=seed)) for seed in (7, 7, 8)]
    assert first.rollouts == again.rollouts
    assert token_ids(first) != token_ids(other)


async def test_a_rollout_does_not_depend_on_the_size_of_its_group(rig):
    few, many = await rig.engine.sample(a_request(count=2)), await rig.engine.sample(a_request(count=6))
    assert token_ids(few) == token_ids(many)[:2]


async def test_logprobs_are_one_a_token_finite_and_never_positive(rig):
    for rollout in await many_rollouts(rig, 6):
        assert rollout.sampler_logprobs.shape == rollout.token_ids.shape
        assert np.isfinite(rollout.sampler_logprobs).all()
        assert (rollout.sampler_logprobs <= 0).all()


async def test_any_eos_id_ends_a_completion_as_its_last_token_and_only_the_limit_truncates(rig):
    rollouts = await many_rollouts(rig, 3)
    for rollout in rollouts:
        ids = rollout.token_ids.tolist()
        assert not set(ids[:-1]) & set(EOS_IDS)
        assert (ids[-1] in EOS_IDS) == (rollout.finish is FinishReason.STOP)
        assert len(ids) == 3 or rollout.finish is FinishReason.STOP
    ends = {rollout.token_ids[-1] for rollout in rollouts if rollout.finish is FinishReason.STOP}
    assert ends == set(EOS_IDS)
    assert FinishReason.LENGTH in {rollout.finish for rollout in rollouts}


async def test_eos_as_the_last_permitted_token_is_not_truncation(rig):
    last = [rollout for rollout in await many_rollouts(rig, 3) if len(rollout.token_ids) == 3]
    assert FinishReason.STOP in {rollout.finish for rollout in last}


async def test_a_prompt_that_does_not_fit_is_refused_and_the_others_go_on(rig):
    params = SamplingParams(max_new_tokens=8)
    requests = [
        a_request(prompt_token_ids=[3] * length, params=params)
        for length in (CONTEXT - 8, CONTEXT - 7, CONTEXT + 4)
    ]
    fits, *too_long = await asyncio.gather(*(rig.engine.sample(r) for r in requests), return_exceptions=True)
    assert isinstance(fits, Sampled)
    assert len(fits.rollouts) == 4
    for error in too_long:
        assert isinstance(error, EngineError)
        assert "do not fit" in str(error)


@pytest.mark.parametrize("prompt", [[], [1, VOCAB], [1, -1]])
async def test_a_prompt_without_tokens_or_with_unknown_ones_is_refused(rig, prompt):
    with pytest.raises(EngineError):
        await rig.engine.sample(a_request(prompt_token_ids=prompt))


async def test_top_k_of_one_always_takes_the_likeliest_token_with_certainty(rig):
    sampled = await rig.engine.sample(a_request(params=SamplingParams(max_new_tokens=6, top_k=1)))
    assert len({tuple(ids) for ids in token_ids(sampled)}) == 1
    assert all((rollout.sampler_logprobs == 0).all() for rollout in sampled.rollouts)


async def test_only_what_is_finished_by_the_deadline_is_returned(rig):
    params = SamplingParams(max_new_tokens=40)
    whole = await rig.engine.sample(a_request(count=32, params=params))
    partial = await rig.engine.sample(a_request(count=32, params=params, deadline_s=3.0))
    assert partial.rollouts == tuple(r for r in whole.rollouts if len(r.token_ids) <= 3)
    assert 0 < len(partial.rollouts) < 32


async def test_a_deadline_that_nobody_meets_gives_an_empty_group(rig):
    request = a_request(params=SamplingParams(max_new_tokens=40), deadline_s=0.5)
    sampled = await rig.engine.sample(request)
    assert sampled.policy == "v1"
    assert sampled.rollouts == ()


async def test_cancelling_a_request_does_not_hurt_the_others(rig):
    alone = await rig.engine.sample(a_request(seed=2))
    rig.hold()
    first, second = (asyncio.ensure_future(rig.engine.sample(a_request(seed=seed))) for seed in (1, 2))
    await rig.begun()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    rig.release()
    assert token_ids(await second) == token_ids(alone)
    assert first.cancelled()


async def test_a_policy_loaded_during_a_batch_serves_only_later_ones(rig):
    before = await rig.engine.sample(a_request())
    rig.hold()
    running = asyncio.ensure_future(rig.engine.sample(a_request()))
    await rig.begun()
    await rig.engine.load_policy("v2", some_factors(rig.shapes, 2), newest=True)
    rig.release()
    assert await running == Sampled("v1", before.rollouts, (await running).generation_s)
    assert (await rig.engine.sample(a_request())).policy == "v2"


async def test_a_request_that_waited_starts_under_what_is_newest_then(rig):
    rig.hold()
    blockers = [asyncio.ensure_future(rig.engine.sample(a_request(seed=seed))) for seed in range(2)]
    await rig.begun()
    waiting = asyncio.ensure_future(rig.engine.sample(a_request()))
    await asyncio.sleep(0)
    await rig.engine.load_policy("v2", some_factors(rig.shapes, 2), newest=True)
    rig.release()
    assert (await waiting).policy == "v2"
    assert {sampled.policy for sampled in await asyncio.gather(*blockers)} == {"v1"}


async def test_a_policy_can_be_asked_for_by_name_whatever_is_newest(rig):
    await rig.engine.load_policy("v2", some_factors(rig.shapes, 2), newest=False)
    assert (await rig.engine.sample(a_request())).policy == "v1"
    assert (await rig.engine.sample(a_request(policy="v2"))).policy == "v2"


async def test_after_a_swap_the_result_is_that_of_an_engine_that_never_knew_another_policy(
    rig, request, make_rig
):
    prompt = list(range(9, 9 + 20)) * 2
    await rig.engine.sample(a_request(prompt_token_ids=prompt))
    await rig.engine.load_policy("v2", some_factors(rig.shapes, 2), newest=True)
    warm = await rig.engine.sample(a_request(prompt_token_ids=prompt))
    cold_rig = await make_rig(request.node.callspec.params["bare"])
    await cold_rig.engine.load_policy("v2", some_factors(rig.shapes, 2), newest=True)
    cold = await cold_rig.engine.sample(a_request(prompt_token_ids=prompt))
    await cold_rig.engine.close()
    assert warm.rollouts == cold.rollouts


async def test_a_name_is_never_bound_to_other_weights(rig):
    before = await rig.engine.sample(a_request())
    with pytest.raises(EngineError, match="other weights"):
        await rig.engine.load_policy("v1", some_factors(rig.shapes, 2), newest=True)
    await rig.engine.unload_policy("v1")
    with pytest.raises(EngineError, match="other weights"):
        await rig.engine.load_policy("v1", some_factors(rig.shapes, 2), newest=True)
    await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
    assert (await rig.engine.sample(a_request())).rollouts == before.rollouts


def with_a_nan(factors: Factors) -> Factors:
    name = next(name for name in factors if ".lora_B." in name)
    spoilt = factors[name].copy()
    spoilt[0, 0] = np.nan
    return factors | {name: spoilt}


FAULTS = {
    "a NaN in B": with_a_nan,
    "a tensor missing": lambda factors: dict(list(factors.items())[:-1]),
    "no name that matches": lambda factors: {f"other.{name}": t for name, t in factors.items()},
    "a wrong shape": lambda factors: {name: t[:, :-1] for name, t in factors.items()},
    "a tensor too many": lambda factors: factors | {"extra.lora_A.weight": np.zeros((4, 4), np.float32)},
}


@pytest.mark.parametrize("spoil", FAULTS.values(), ids=FAULTS.keys())
async def test_factors_that_do_not_fit_exactly_are_refused_and_the_policy_stays(rig, spoil):
    before = await rig.engine.sample(a_request())
    with pytest.raises(EngineError, match="refused"):
        await rig.engine.load_policy("v2", spoil(some_factors(rig.shapes, 2)), newest=True)
    assert await rig.engine.sample(a_request()) == Sampled("v1", before.rollouts, before.generation_s)


async def test_an_unloaded_policy_serves_who_has_it_and_nobody_else(rig):
    await rig.engine.load_policy("v2", some_factors(rig.shapes, 2), newest=True)
    rig.hold()
    running = asyncio.ensure_future(rig.engine.sample(a_request(policy="v1")))
    await rig.begun()
    await rig.engine.unload_policy("v1")
    with pytest.raises(EngineError, match="v1 is not loaded"):
        await rig.engine.sample(a_request(policy="v1"))
    rig.release()
    assert len((await running).rollouts) == 4


async def test_without_a_policy_nothing_is_sampled(bare):
    with pytest.raises(EngineError, match="no policy"):
        await bare.engine.sample(a_request())


async def test_the_event_loop_runs_on_while_a_batch_is_held(rig):
    rig.hold()
    running = asyncio.ensure_future(rig.engine.sample(a_request()))
    await rig.begun()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not running.done()
    rig.release()
    await running


async def test_closing_fails_what_runs_and_what_comes_later(rig):
    rig.hold()
    running = asyncio.ensure_future(rig.engine.sample(a_request(params=SamplingParams(max_new_tokens=80))))
    await rig.begun()
    closing = asyncio.ensure_future(rig.engine.close())
    await asyncio.sleep(0)
    rig.release()
    await closing
    with pytest.raises(EngineError, match="closed"):
        await running
    with pytest.raises(EngineError, match="closed"):
        await rig.engine.sample(a_request())
