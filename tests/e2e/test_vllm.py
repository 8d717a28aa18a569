"""A whole run whose sampler starts vLLM itself, on this machine's CPU."""

from __future__ import annotations

import shlex

import pytest

from node.cli.node_options import SamplerOptions
from node.swarm import open_swarm, peers_for
from tests.e2e.test_ring import steps_of, the_head
from tests.vllm_real import PYTHON, WORDS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed here: just test-vllm"),
]


async def test_a_synchronous_run_on_vllm_is_on_policy_to_the_digit(
    environment, small_run, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    spec = small_run(staleness={"max_staleness": 0}, learner={"updates": 4, "schedule": "constant"})
    sampler = SamplerOptions.of(rows=64, command=shlex.join(WORDS))
    peers = peers_for(1, 1, 1, environment, sampler_options=sampler.words)
    async with open_swarm(spec, environment, tmp_path, peers) as swarm:
        await swarm.finished()
        head = await the_head(swarm)
        steps = await steps_of(swarm, 4)
    assert head.count == 4
    assert [step["sample/staleness_max"] for step in steps] == [0.0] * 4
    assert all(step["ratio_max_dev_on_policy"] < 1e-4 for step in steps)
    assert "vllm_lives" in (tmp_path / "logs" / "sampler-1.log").read_text("utf-8")
