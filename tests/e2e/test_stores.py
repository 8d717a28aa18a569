"""The whole ring with its adapters in a bucket of the Hub's stand-in, and in the broker itself."""

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
from tests.hub.faults import MANY, Fault
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


@pytest.mark.release
async def test_a_hub_that_fails_every_third_call_and_stalls_once_only_slows_the_swarm(
    environment: Environment, hub_server: HubServer, tmp_path: Path
):
    third = Fault(r"/api/buckets/alice/faulty", status=500, every=3, count=MANY)
    stall = Fault(r"POST /api/buckets/alice/faulty/batch", stall=True, skip=9)
    hub_server.faults += [stall, third]
    try:
        file = a_run_file(tmp_path, "hf://buckets/alice/faulty/runs")
        outcome = await up(file, hub_server, "--create-bucket")
    finally:
        hub_server.faults.clear()
    learned(outcome)
    assert stall.hit.is_set()
    bucket = hub_server.buckets["alice/faulty"]
    assert bucket.private
    assert all(path.startswith("runs/demo/") for path in bucket.files)
    updates = [path for path in bucket.files if "/updates/" in path and path.endswith("/manifest.json")]
    assert len(updates) == UPDATES


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
