"""The peers of a learner: counted by presence, one of them leads, and the end of the run is noticed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS
from protocol.codec import encode
from protocol.messages import NodeState
from protocol.subjects import FINISHED_KEY, Bucket, node_key
from roles.learner.peers import PEERS_POLL_S, Peers
from tests.build import an_identity
from tests.ground import Ground, running


async def appear(ground: Ground, node: str, *roles: str) -> None:
    state = NodeState(
        run="test", node=node, roles=roles, public_key="k", host="h", started_at=0.0, clock=GENESIS
    )
    await ground.bus(node).put(Bucket.NODE, node_key(node), encode(state, an_identity(node)), ttl_s=12)


@in_virtual_time
async def test_only_learners_count_and_this_one_always_does(tmp_path: Path):
    ground = Ground(tmp_path)
    peers = Peers(ground.ring("learner-2"))
    await peers.look()
    assert (peers.count, peers.leads) == (1, True)
    await appear(ground, "learner-1", "learner")
    await appear(ground, "sampler-1", "sampler", "verifier")
    await peers.look()
    assert (peers.count, peers.leads) == (2, False)
    await ground.clock.sleep(12.0)
    await peers.look()
    assert (peers.count, peers.leads) == (1, True)


@in_virtual_time
async def test_a_peers_unreadable_presence_hides_nobody_else(tmp_path: Path):
    ground = Ground(tmp_path)
    await appear(ground, "learner-1", "learner")
    await ground.bus().put(Bucket.NODE, node_key("a-stranger"), b"noise")
    peers = Peers(ground.ring("learner-2"))
    await peers.look()
    assert peers.learners == {"learner-1", "learner-2"}


@in_virtual_time
async def test_a_broker_that_is_away_changes_nothing(tmp_path: Path):
    ground = Ground(tmp_path)
    bus = ground.bus("learner-2")
    peers = Peers(ground.ring("learner-2", bus))
    await appear(ground, "learner-1", "learner")
    await peers.look()
    bus.away = True
    await peers.look()
    assert peers.count == 2


@in_virtual_time
async def test_who_does_not_lead_waits_for_the_leader_to_end_the_run_or_to_go(tmp_path: Path):
    ground = Ground(tmp_path)
    peers = Peers(ground.ring("learner-2"))
    await appear(ground, "learner-1", "learner")
    await peers.look()
    async with running(peers):
        waiting = asyncio.ensure_future(peers.until_leading(asyncio.Event()))
        await ground.clock.sleep(2 * PEERS_POLL_S)
        assert not waiting.done()
        await ground.bus().put(Bucket.RUN, FINISHED_KEY, b"1")
        await waiting
        assert (peers.finished, peers.leads) == (True, False)


@in_virtual_time
async def test_a_leader_that_dies_is_succeeded(tmp_path: Path):
    ground = Ground(tmp_path)
    peers = Peers(ground.ring("learner-2"))
    await appear(ground, "learner-1", "learner")
    await peers.look()
    async with running(peers):
        await peers.until_leading(asyncio.Event())
    assert peers.leads
    assert not peers.finished
