"""What every engine promises about requests that end early: abandoned, or of a sampler that stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from protocol.errors import EngineError
from protocol.messages import SamplingParams
from roles.sampler.engine import Sampled
from tests.engine_rigs import Rig, a_request, some_factors


@pytest.fixture(params=["fake", "transformers", "vllm-stub", pytest.param("vllm", marks=pytest.mark.vllm)])
async def rig(request, make_rig) -> AsyncIterator[Rig]:
    """A rig whose engine serves policy v1."""
    rig = await make_rig(request.param)
    await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
    yield rig
    rig.release()
    await rig.engine.close()


async def test_abandoning_a_policy_fails_who_took_it_as_the_newest_and_nobody_else(rig):
    rig.hold()
    params = SamplingParams(max_new_tokens=40)
    newest = asyncio.ensure_future(rig.engine.sample(a_request(params=params)))
    by_name = asyncio.ensure_future(rig.engine.sample(a_request(policy="v1", params=params)))
    await rig.begun()
    await rig.engine.load_policy("v2", some_factors(rig.shapes, 2), newest=True)
    await rig.engine.abandon("v1")
    rig.release()
    with pytest.raises(EngineError, match="too old"):
        await newest
    assert len((await by_name).rollouts) == 4
    assert (await rig.engine.sample(a_request())).policy == "v2"


async def test_concluding_ends_what_runs_and_fails_what_has_not_begun(rig):
    params = SamplingParams(max_new_tokens=80)
    rig.hold()
    running = [asyncio.ensure_future(rig.engine.sample(a_request(seed=n, params=params))) for n in range(2)]
    await rig.begun()
    late = asyncio.ensure_future(rig.engine.sample(a_request()))
    await asyncio.sleep(0)
    await rig.engine.conclude()
    rig.release()
    for ended in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(ended, EngineError) or (isinstance(ended, Sampled) and len(ended.rollouts) < 4)
    with pytest.raises(EngineError, match="concludes"):
        await late
    assert len((await rig.engine.sample(a_request())).rollouts) == 4, "who comes later is served"
