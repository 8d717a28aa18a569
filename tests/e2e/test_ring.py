"""The ring keeps its promises while real processes die."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import structlog
from safetensors.numpy import load_file

from node.broker import start_broker
from node.demo import trained_twice
from node.stores import open_store
from node.swarm import Swarm, open_swarm, peers_for
from protocol.codec import decode_as
from protocol.manifest import Manifest
from protocol.messages import Event, Head
from protocol.runspec import RunSpec
from protocol.subjects import Bucket

log = structlog.get_logger()


async def the_head(swarm: Swarm) -> Head:
    (entry,) = (await swarm.bus.list(Bucket.POLICY, "head")).values()
    return decode_as(entry.value, Head)


async def steps_of(swarm: Swarm, count: int) -> list[dict[str, Any]]:
    """The first ``count`` step_trained events, from the beginning."""
    found = []
    async for frame in swarm.bus.events(replay=True):
        event = decode_as(frame, Event)
        if event.name == "step_trained":
            found.append(event.fields)
            if len(found) == count:
                return found
    raise AssertionError("events ended")


async def manifests(spec: RunSpec, cache: Path) -> list[Manifest]:
    store = open_store(spec.store, cache)
    return [await store.manifest(path) for path in await store.list(f"{spec.name}/updates")]


async def test_synchronous_runs_with_one_seed_are_the_same_byte_for_byte(environment, small_run, tmp_path):
    adapters = []
    for name in ("first", "second"):
        directory = tmp_path / name
        spec = small_run(
            directory, staleness={"max_staleness": 0}, learner={"updates": 6, "schedule": "constant"}
        )
        peers = peers_for(1, 1, 1, environment)
        async with open_swarm(spec, environment, directory, peers) as swarm:
            await swarm.finished()
            head = await the_head(swarm)
            steps = await steps_of(swarm, 6)
        assert head.count == 6
        assert [step["sample/staleness_max"] for step in steps] == [0.0] * 6
        # Every token of a synchronous run is on policy, and the two engines agree on it.
        assert all(step["ratio_max_dev_on_policy"] < 1e-4 for step in steps)
        adapters.append(directory / "store" / spec.name / "exports" / head.clock.digest)
    first, second = (load_file(path / "adapter_model.safetensors") for path in adapters)
    assert first.keys() == second.keys()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert any(first[name].any() for name in first if "lora_B" in name)


async def test_killed_learner_continues_at_its_last_head(environment, small_run, tmp_path):
    spec = small_run(learner={"updates": 24})
    async with open_swarm(spec, environment, tmp_path, peers_for(1, 1, 1, environment)) as swarm:
        ended = asyncio.ensure_future(swarm.finished())
        await swarm.until(lambda progress: progress.version >= 8)
        swarm.kill("learner-1", for_good=False)
        committed = await the_head(swarm)
        await ended
        head = await the_head(swarm)
        rewards = swarm.progress.rewards
    updates = await manifests(spec, tmp_path / "cache")
    assert head.count == 24
    assert sorted(m.count for m in updates if m.count <= committed.count) == list(
        range(1, committed.count + 1)
    )
    committed_paths = {m.path for m in updates}
    assert head.path in committed_paths
    assert await trained_twice_in_commits(spec, tmp_path / "cache", head) == 0
    # The curve goes on where it was, not from the beginning.
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.15


async def trained_twice_in_commits(spec: RunSpec, cache: Path, head: Head) -> int:
    """As ``trained_twice``, over the updates of the committed history alone.

    A learner killed between upload and commit leaves an upload that no head ever named; its groups are
    trained again, and nobody can have used it.
    """
    newest: dict[int, Manifest] = {}
    for manifest in await manifests(spec, cache):
        newest.setdefault(manifest.count, manifest)
    groups = [group for manifest in newest.values() for group in manifest.groups]
    assert head.groups_trained == len(groups)
    return len(groups) - len(set(groups))


async def test_run_goes_on_after_the_broker_was_killed(environment, small_run, tmp_path):
    spec = small_run(learner={"updates": 24})
    async with open_swarm(spec, environment, tmp_path, peers_for(1, 1, 1, environment)) as swarm:
        ended = asyncio.ensure_future(swarm.finished())
        await swarm.until(lambda progress: progress.version >= 6)
        before = await the_head(swarm)
        broker = swarm.broker
        assert broker.process is not None
        broker.process.kill()
        broker.process.wait()
        started = time.monotonic()
        swarm.broker = start_broker(tmp_path / "broker", binary=environment.nats_server)
        assert swarm.broker.url == broker.url
        version = swarm.progress.version
        await swarm.until(lambda progress: progress.version > version)
        back_s = time.monotonic() - started
        log.info("broker_back", seconds=back_s)
        await ended
        head = await the_head(swarm)
    assert head.count == 24
    assert head.count > before.count
    assert await trained_twice(spec, tmp_path / "cache") == 0
    # Reconnected, redelivered, sampled, scored and trained: within seconds, not after some time-out.
    assert back_s < 5 + 2 * spec.sampling.ack_wait_s
