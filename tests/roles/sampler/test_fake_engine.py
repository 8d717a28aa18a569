"""What only the fake promises: virtual time, a count of calls, and room for a few groups at once."""

from __future__ import annotations

import asyncio

from protocol.messages import SamplingParams
from tests.engine_rigs import FakeRig, a_request, some_factors


async def test_a_group_takes_the_time_of_its_longest_rollout_on_the_given_clock():
    rig = FakeRig()
    await rig.engine.load_policy("v1", some_factors(rig.shapes), newest=True)
    sampled = await rig.engine.sample(a_request())
    assert sampled.generation_s == max(len(rollout.token_ids) for rollout in sampled.rollouts)
    assert rig.monotonic() == sampled.generation_s


async def test_no_more_than_groups_max_run_at_once():
    rig = FakeRig()
    await rig.engine.load_policy("v1", some_factors(rig.shapes), newest=True)
    rig.hold()
    running = [asyncio.ensure_future(rig.engine.sample(a_request(seed=seed))) for seed in range(5)]
    await rig.begun()
    assert rig.asleep == rig.engine.groups_max == 2
    rig.release()
    assert len(await asyncio.gather(*running)) == 5


async def test_calls_are_counted_by_method():
    rig = FakeRig()
    await rig.engine.load_policy("v1", some_factors(rig.shapes), newest=True)
    for _ in range(3):
        await rig.engine.sample(a_request(params=SamplingParams(max_new_tokens=1)))
    await rig.engine.close()
    assert rig.engine.calls == {"load_policy": 1, "sample": 3, "close": 1}


async def test_other_weights_and_other_prompts_have_other_distributions():
    rig = FakeRig()
    for name, seed in (("v1", 1), ("v2", 2)):
        await rig.engine.load_policy(name, some_factors(rig.shapes, seed), newest=False)
    requests = [a_request(policy="v1"), a_request(policy="v2"), a_request(policy="v1", prompt_token_ids=[1])]
    groups = [await rig.engine.sample(request) for request in requests]
    assert len({group.rollouts for group in groups}) == 3
