"""vLLM itself: its tokens are the policy's, through switches under load, and while a server of two dies."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import pytest

from bench.scoring.learner import LearnerScorer
from node.engines import open_vllm
from node.models import resolve_model
from node.settings import NodeSettings, VllmSettings
from protocol.messages import SamplingParams
from protocol.runspec import ModelSpec
from roles.sampler.engine import Sampled, SampleRequest
from tests.build import a_runspec
from tests.engine_rigs import EOS_IDS, LORA, a_request, some_factors
from tests.vllm_real import WORDS
from tests.vllm_rigs import VllmRig, until_changed

pytestmark = pytest.mark.vllm

FP32 = 1e-4
"""Within which two computations of one log-probability agree."""

PARAMS = SamplingParams(max_new_tokens=24)


@pytest.fixture
async def rig(vllm_server, tmp_path) -> AsyncIterator[VllmRig]:
    rig = await VllmRig.open(vllm_server.url, vllm_server.shapes, tmp_path, rows_max=32, check=True)
    yield rig
    await rig.engine.close()


@pytest.fixture(scope="module")
def scorer(vllm_server) -> LearnerScorer:
    return LearnerScorer(vllm_server.model_dir, ModelSpec(ref="local"), LORA)


def apart(scorer: LearnerScorer, request: SampleRequest, sampled: Sampled) -> float:
    """Largest difference from the learner's log-probabilities of the same tokens."""
    completions = [rollout.token_ids for rollout in sampled.rollouts]
    ours = scorer.logprobs(request.prompt_token_ids, completions, request.params)
    reported = np.concatenate([rollout.sampler_logprobs for rollout in sampled.rollouts])
    return float(np.abs(np.concatenate(ours) - reported).max())


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.7}, {}, {"temperature": 1.3}, {"top_p": 0.9}],
    ids=["colder", "plain", "hotter", "top-p"],
)
@pytest.mark.parametrize("size", [0.0, 0.3], ids=["base", "adapter"])
async def test_logprobs_are_the_learners(rig, scorer, size, changes):
    factors = some_factors(rig.shapes, 1, size)
    await rig.engine.load_policy("v1", factors, newest=True)
    request = a_request(count=8, params=SamplingParams(max_new_tokens=24, **changes))
    sampled = await rig.engine.sample(request)
    scorer.load(factors)
    assert apart(scorer, request, sampled) < FP32


async def test_switches_under_load_put_no_token_under_a_wrong_policy(rig, scorer):
    policies = {f"v{number}": some_factors(rig.shapes, number, 0.3) for number in range(1, 7)}
    await rig.engine.load_policy("v1", policies["v1"], newest=True)
    done: list[tuple[SampleRequest, Sampled]] = []
    over, finished = asyncio.Event(), asyncio.Semaphore(0)

    async def stream(seed: int) -> None:
        while not over.is_set():
            # All share a prompt longer than a block of the prefix cache.
            prompt = [3 + number % 30 for number in range(50)]
            request = a_request(prompt_token_ids=prompt, seed=seed, params=PARAMS)
            done.append((request, await rig.engine.sample(request)))
            finished.release()
            seed += 100

    async with asyncio.TaskGroup() as streams:
        for seed in range(6):
            streams.create_task(stream(seed))
        for name in list(policies)[1:]:
            for _ in range(3):
                await finished.acquire()
            await rig.engine.load_policy(name, policies[name], newest=True)
            await rig.engine.unload_policy(f"v{int(name[1:]) - 1}")
        over.set()
    assert {sampled.policy for _, sampled in done} >= {"v1", "v3", "v5"}
    for name, factors in policies.items():
        scorer.load(factors)
        for request, sampled in done:
            if sampled.policy == name:
                assert apart(scorer, request, sampled) < FP32
            else:
                assert apart(scorer, request, sampled) > 100 * FP32, "the test can tell policies apart"


async def test_of_two_servers_one_is_killed_and_comes_back_with_the_same_policy(
    vllm_server, scorer, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = resolve_model(ModelSpec(ref=str(vllm_server.model_dir)), tmp_path)
    spec = a_runspec(
        model={"ref": str(vllm_server.model_dir)},
        lora=LORA.model_dump(),
        tasks={"source": "builtin:sort-digits", "prompt_tokens_max": 64},
        sampling={"max_new_tokens": 24},
    )
    settings = NodeSettings(
        run="a-run",
        roles=("sampler",),
        broker="nats://127.0.0.1",
        device="cpu,cpu",
        threads=1,
        rows_max=8,
        engine="vllm",
        vllm=VllmSettings(command=shlex.join(WORDS)),
    )
    engine = await open_vllm(spec, settings, model, EOS_IDS, tmp_path)
    requests = [a_request(count=8, seed=seed, params=PARAMS) for seed in range(2)]

    async def a_group_on_each() -> list[Sampled]:
        groups = [asyncio.ensure_future(engine.sample(request)) for request in requests]
        while sum(replica.rows for replica in engine.replicas.all) < 16:
            await asyncio.sleep(0)
        assert [replica.rows for replica in engine.replicas.all] == [8, 8]
        return await asyncio.gather(*groups)

    try:
        factors = some_factors(engine.shapes, 1, 0.3)
        await engine.load_policy("v1", factors, newest=True)
        scorer.load(factors)
        before = await a_group_on_each()
        assert max(map(partial(apart, scorer), requests, before)) < FP32
        server = engine.replicas.all[0].server
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        await until_changed(server, lives=False)
        alone = [await engine.sample(request) for request in requests]
        assert max(map(partial(apart, scorer), requests, alone)) < FP32
        await until_changed(server, lives=True)
        after = await a_group_on_each()
        assert max(map(partial(apart, scorer), requests, after)) < FP32
        tokens = [
            [[r.token_ids.tolist() for r in group.rollouts] for group in x] for x in (before, alone, after)
        ]
        assert tokens[0] == tokens[1] == tokens[2], "a server is like the other"
    finally:
        await engine.close()
