"""What the vLLM engine makes of servers that fail, lie, stall, forget and die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.errors import EngineError
from protocol.messages import SamplingParams
from roles.sampler.engine import Sampled
from tests.engine_rigs import EOS_IDS, a_request, some_factors
from tests.vllm_rigs import IMPATIENT, STUB_SHAPES, VllmRig, until_changed
from tests.vllm_stub import StubModel, StubServer

COMPLETIONS, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LONG = SamplingParams(max_new_tokens=80)


@pytest.fixture
async def stub() -> AsyncIterator[StubServer]:
    async with StubServer(StubModel()) as stub:
        yield stub


@pytest.fixture
async def rig(stub, tmp_path) -> AsyncIterator[VllmRig]:
    """An engine that serves v1."""
    rig = await VllmRig.open(stub.url, STUB_SHAPES, tmp_path / "adapters", patience=IMPATIENT)
    await rig.engine.load_policy("v1", some_factors(STUB_SHAPES, 1), newest=True)
    yield rig
    rig.release()
    await rig.engine.close()


def running(rig: VllmRig, **changes: Any) -> asyncio.Future[Sampled]:
    return asyncio.ensure_future(rig.engine.sample(a_request(**changes)))


async def test_a_server_fault_is_tried_again_and_the_rollouts_are_the_same(rig, stub):
    before = await rig.engine.sample(a_request())
    stub.faults.statuses[COMPLETIONS] = [500, 503, 500]
    assert (await rig.engine.sample(a_request())).rollouts == before.rollouts
    assert stub.calls[COMPLETIONS] == 4 + 4 + 3


async def test_a_server_that_keeps_failing_costs_its_group_and_no_other(rig, stub):
    stub.faults.statuses[COMPLETIONS] = [500] * 4
    with pytest.raises(EngineError, match="answered 500"):
        await rig.engine.sample(a_request(count=1))
    assert len((await rig.engine.sample(a_request())).rollouts) == 4


async def test_a_refusal_fails_at_once(rig, stub):
    stub.faults.statuses[COMPLETIONS] = [400]
    with pytest.raises(EngineError, match="answered 400 to /v1/completions: as the test wants it"):
        await rig.engine.sample(a_request(count=1))
    assert stub.calls[COMPLETIONS] == 1


async def test_a_group_of_which_one_rollout_fails_is_aborted_whole(rig, stub):
    rig.hold()
    group = running(rig, count=4)
    await rig.begun()
    stub.faults.statuses[COMPLETIONS] = [400]
    stub.faults.stalls = True
    rig.release()
    with pytest.raises(EngineError, match="400"):
        await group
    await stub.until_running(0)
    stub.faults.stalls = False
    assert len((await rig.engine.sample(a_request())).rollouts) == 4


async def test_an_answer_under_another_policy_is_no_rollout(rig, stub):
    stub.faults.answers_as = "grpo-base"
    with pytest.raises(EngineError, match="answered under grpo-base, not under v1-"):
        await rig.engine.sample(a_request())


SPOILED: dict[str, tuple[dict[str, Any], str]] = {
    "another prompt": ({"prompt_token_ids": [1, 1, 5, 6]}, "another prompt"),
    "no token ids": ({"token_ids": None}, "lacks a field"),
    "no log-probabilities": ({"logprobs": None}, "lacks a field"),
    "a NaN": ({"token_ids": [9], "logprobs": {"token_logprobs": [float("nan")]}}, "not finite"),
    "too few log-probabilities": (
        {"token_ids": [9, 9], "logprobs": {"token_logprobs": [-1.0]}},
        "1 log-prob",
    ),
    "no token": ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "has no token"),
    "too many tokens": ({"token_ids": [9] * 7, "logprobs": {"token_logprobs": [-1.0] * 7}}, "more than 6"),
    "words after EOS": (
        {"token_ids": [EOS_IDS[0], 9], "logprobs": {"token_logprobs": [-1.0] * 2}},
        "goes on after EOS",
    ),
    "an early end": (
        {"token_ids": [9, 9], "logprobs": {"token_logprobs": [-1.0] * 2}, "finish_reason": "stop"},
        "ended by 'stop' after 2 of 6 tokens, without EOS",
    ),
    "an abort": (
        {"token_ids": [9, 9], "logprobs": {"token_logprobs": [-1.0] * 2}, "finish_reason": "abort"},
        "ended by 'abort'",
    ),
}


@pytest.mark.parametrize(("spoiled", "fault"), SPOILED.values(), ids=SPOILED.keys())
async def test_an_answer_that_is_not_what_was_asked_for_is_no_rollout(rig, stub, spoiled, fault):
    stub.faults.spoiled = spoiled
    with pytest.raises(EngineError, match=fault):
        await rig.engine.sample(a_request())


async def test_cancelling_a_request_aborts_it_in_the_server(rig, stub):
    stub.faults.stalls = True
    group = running(rig, count=4)
    await stub.until_running(4)
    group.cancel()
    await stub.until_running(0)
    assert stub.aborted == 4


async def test_what_misses_its_deadline_is_aborted_in_the_server(rig, stub):
    whole = await rig.engine.sample(a_request(count=8, params=LONG))
    lengths = sorted(len(rollout.token_ids) for rollout in whole.rollouts)
    partial = await rig.engine.sample(a_request(count=8, params=LONG, deadline_s=float(lengths[3])))
    assert partial.rollouts == tuple(r for r in whole.rollouts if len(r.token_ids) <= lengths[3])
    assert rig.replicas.all[0].rows == 0


async def test_a_server_that_others_restart_gets_its_policies_again(rig, stub):
    before = await rig.engine.sample(a_request())
    stub.loaded.clear()
    with pytest.raises(EngineError, match="404"):
        await rig.engine.sample(a_request())
    assert (await rig.engine.sample(a_request())).rollouts == before.rollouts


async def test_what_a_dying_server_had_in_hand_fails_and_what_waits_is_served_by_its_successor(rig, stub):
    before = await rig.engine.sample(a_request())
    stub.faults.stalls = True
    in_hand = [running(rig, seed=seed) for seed in range(2)]
    await stub.until_running(8)
    waiting = running(rig)
    await stub.stop()
    for lost in await asyncio.gather(*in_hand, return_exceptions=True):
        assert isinstance(lost, EngineError)
    await until_changed(rig.server, lives=False)
    assert not waiting.done()
    stub.faults.stalls = False
    await stub.start_again()
    assert (await waiting).rollouts == before.rollouts


async def test_a_policy_that_comes_while_the_server_is_dead_is_loaded_into_its_successor(rig, stub):
    await stub.stop()
    lost = running(rig)
    with pytest.raises(EngineError):
        await lost
    await until_changed(rig.server, lives=False)
    loading = asyncio.ensure_future(rig.engine.load_policy("v2", some_factors(STUB_SHAPES, 2), newest=True))
    await stub.start_again()
    await loading
    assert (await rig.engine.sample(a_request())).policy == "v2"


async def test_a_server_that_is_well_but_gives_no_token_is_lost(rig, stub):
    stub.faults.stalls = True
    rig.hold()
    group = running(rig, deadline_s=0.5)
    await rig.begun()
    rig.time.skip(0.5)
    assert (await group).rollouts == ()
    rig.release()
    await until_changed(rig.server, lives=False)
    stub.faults.stalls = False
    await until_changed(rig.server, lives=True)
    assert len((await rig.engine.sample(a_request())).rollouts) == 4


async def test_a_server_that_says_it_is_sick_is_lost_until_it_is_well(rig, stub):
    stub.faults.sick = True
    await until_changed(rig.server, lives=False)
    waiting = running(rig)
    stub.faults.sick = False
    assert len((await waiting).rollouts) == 4


async def test_an_adapter_that_the_server_does_not_take_is_refused_and_the_policy_stays(rig, stub):
    stub.faults.statuses[LOAD] = [400]
    with pytest.raises(EngineError, match="answered 400"):
        await rig.engine.load_policy("v2", some_factors(STUB_SHAPES, 2), newest=True)
    assert (await rig.engine.sample(a_request())).policy == "v1"
    await rig.engine.load_policy("v2", some_factors(STUB_SHAPES, 2), newest=True)
    assert (await rig.engine.sample(a_request())).policy == "v2"


async def test_an_adapter_is_unloaded_after_its_last_rollout_and_its_name_is_never_used_again(
    rig, stub, tmp_path
):
    rig.hold()
    last = running(rig)
    await rig.begun()
    first_name = set(stub.loaded)
    await rig.engine.load_policy("v2", some_factors(STUB_SHAPES, 2), newest=True)
    await rig.engine.unload_policy("v1")
    assert first_name < set(stub.loaded), "a rollout still runs under it"
    rig.release()
    await last
    await rig.engine.settled()
    assert {name[:2] for name in stub.loaded} == {"v2"}
    await rig.engine.load_policy("v1", some_factors(STUB_SHAPES, 1), newest=True)
    assert first_name.isdisjoint(stub.loaded)
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= set(stub.loaded)


async def test_concluding_takes_away_no_group_that_is_whole(rig):
    group = running(rig)
    await asyncio.sleep(0)
    (call,) = rig.engine._calls.values()
    while not call.whole:
        await asyncio.sleep(0)
    assert not group.done()
    await rig.engine.conclude()
    assert len((await group).rollouts) == 4


async def test_a_closed_engine_leaves_nothing_behind(stub, tmp_path):
    rig = await VllmRig.open(stub.url, STUB_SHAPES, tmp_path / "adapters")
    for number in (1, 2):
        await rig.engine.load_policy(f"v{number}", some_factors(STUB_SHAPES, number), newest=True)
    await rig.engine.close()
    assert stub.loaded == {}
    assert list((tmp_path / "adapters").iterdir()) == []
