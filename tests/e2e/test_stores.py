"""A swarm with its adapters in the broker itself, and one whose bucket is not there."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from node.demo import RUN_FILE
from node.settings import Environment
from tests.hub.server import HubServer

UPDATES = 24


async def up(run_file: Path, hub: HubServer, *options: str) -> dict[str, object]:
    """What ``grpo-node up --json`` ends with, as a person with alice's token calls it."""
    cache = run_file.parent / "xet"
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_alice", "HF_XET_CACHE": str(cache)}
    command = [sys.executable, "-m", "node", "up", str(run_file), "--json", "--threads", "1", *options]
    process = await asyncio.create_subprocess_exec(
        *command, "--dir", str(run_file.parent / "up"), env=environ, stdout=-1, stderr=-1
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


def a_run_file(directory: Path, store: str) -> Path:
    text = RUN_FILE.format(seed=0, updates=UPDATES, store=store)
    file = directory / "run.toml"
    file.write_text(text.replace("every = 100\nproblems = 128", "every = 0\nproblems = 0"))
    return file


def learned(outcome: dict[str, object]) -> None:
    rewards = outcome["curve"]
    assert isinstance(rewards, list)
    assert outcome["updates"] == UPDATES
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.15
    factors = load_file(Path(str(outcome["adapter"])) / "adapter_model.safetensors")
    assert any(factor.any() for name, factor in factors.items() if "lora_B" in name)


@pytest.mark.release  # the parts: stores under contract, and a swarm whose adapters lie in a bucket
async def test_a_swarm_learns_with_its_adapters_in_the_broker(
    environment: Environment, hub_server: HubServer, tmp_path: Path
):
    learned(await up(a_run_file(tmp_path, "nats://"), hub_server))


@pytest.mark.parametrize("url", ["hf://buckets/alice/never-made", "hf://buckets/bob/his"])
async def test_a_bucket_that_is_not_there_is_one_line(
    environment: Environment, hub_server: HubServer, tmp_path: Path, url: str
):
    with pytest.raises(AssertionError, match=r"grpo-node: there is no bucket .* --create-bucket"):
        await up(a_run_file(tmp_path, url), hub_server)
