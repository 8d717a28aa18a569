"""The whole ring across the open internet: it learns, in fair weather and while the Hub fails."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from safetensors.numpy import load_file

from tests.e2e.internet import BUCKET, RUN, UPDATES, Ring, open_ring
from tests.hub.faults import MANY, Fault
from tests.hub.server import HubServer
from tests.hub.standin import running

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.timeout(900)

log = structlog.get_logger()

MAX_STALENESS = 4
BLOCKED_SHARE_MAX = 0.01
"""Of the time of all steps: how long finished steps may wait for a place before the store."""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A Hub of one's own: its weather is nobody else's."""
    with running(HubServer()) as server:
        yield server


def check_learned(ring: Ring) -> None:
    """On held-out problems it is better than before; no step waited for the store; nothing was too stale."""
    progress = ring.progress
    (_, first), (version, last) = min(progress.evals), max(progress.evals)
    log.info("ring", evals=progress.evals, blocked_s=progress.blocked_s, step_s=progress.step_s)
    assert version == UPDATES
    assert last > first + 0.2, progress.evals
    assert progress.blocked_s < BLOCKED_SHARE_MAX * progress.step_s, (progress.blocked_s, progress.step_s)
    assert progress.staleness_max <= MAX_STALENESS


async def check_bucket(ring: Ring, directory: Path) -> None:
    """All updates lie there, for nobody else to see, and the adapter can be fetched."""
    bucket = ring.hub.buckets[BUCKET]
    assert bucket.private
    assert all(path.startswith(f"runs/{RUN}/") for path in bucket.files)
    updates = [path for path in bucket.files if "/updates/" in path and path.endswith("/manifest.json")]
    assert len(updates) == UPDATES
    store = f"hf://buckets/{BUCKET}/runs"
    (export,) = json.loads(await ring.run("adapters", "list", store, "--json"))
    await ring.run("adapters", "fetch", store, export["path"], "--to", str(directory / "adapter"))
    factors = load_file(directory / "adapter" / "adapter_model.safetensors")
    assert any(factor.any() for name, factor in factors.items() if "lora_B" in name)


async def test_friends_learn_together_though_one_is_put_out_and_the_proxy_starts_again(
    hub: HubServer, tmp_path: Path
):
    async with open_ring(tmp_path, hub) as ring:
        await ring.until(lambda progress: progress.version >= 3)
        assert "bob is out" in await ring.run("revoke", "bob", "--dir", "broker")
        listed = await ring.run("invitations", "--dir", "broker")
        assert re.search(r"revoked\s+sampler bob", listed)
        assert re.search(r"good\s+sampler ann", listed)

        # What is sampled from now on comes through the proxy.
        version = ring.progress.version
        await ring.until(lambda progress: progress.version >= version + 3)
        ring.proxy.cut()
        await ring.finished("ada", "eve", "ann")
        check_learned(ring)
        await check_bucket(ring, tmp_path)
        assert ring.proxy.passed >= 2
        assert ring.proxy.refused == 0
        assert '"groups_dead": 0' in await ring.run("status", RUN, "--json")
        assert "broker_permission_denied" not in ring.logs()


@pytest.mark.release
async def test_a_hub_that_fails_every_third_call_and_stalls_once_holds_up_no_step(
    hub: HubServer, tmp_path: Path
):
    stall = Fault(r"POST .*/batch$", stall=True, skip=9)
    hub.faults += [stall, Fault(r"/api/buckets/", status=500, every=3, count=MANY)]
    async with open_ring(tmp_path, hub) as ring:
        await asyncio.to_thread(stall.hit.wait)
        steps, commits = len(ring.progress.rewards), len(ring.progress.publish_s)
        await ring.until(lambda progress: len(progress.publish_s) > commits)
        assert len(ring.progress.rewards) > steps, "no step was made while an update waited for its answer"
        await ring.finished("ada", "eve", "bob", "ann")
        hub.faults.clear()
        check_learned(ring)
        await check_bucket(ring, tmp_path)
