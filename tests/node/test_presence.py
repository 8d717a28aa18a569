"""Presence: appears, is renewed, ends with its node in order or by itself, and shows whose key is whose."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.presence import RENEW_S, TTL_S, Doing, Presence
from node.virtual_time import in_virtual_time
from protocol.clock import GENESIS
from protocol.codec import decode_as, encode
from protocol.identity import Identity
from protocol.messages import NodeState
from protocol.ports import Entry
from protocol.subjects import FINISHED_KEY, Bucket, node_key
from tests.build import RUN, a_clock, an_identity
from tests.ground import FaultyBus, Ground


class Present:
    """A node that only is present."""

    def __init__(self, ground: Ground, name: str) -> None:
        self._ground = ground
        self.name = name
        self.bus: FaultyBus = ground.bus(name)
        self.presence = Presence(ground.ring(name, self.bus, "node"), ("sampler",), {"device": "cpu"})
        self.now = Doing(GENESIS)
        self.left = asyncio.Event()
        self.finished = 0
        self.work = asyncio.create_task(self.presence.run(self.left, lambda: self.now, self._on_finished))

    def _on_finished(self) -> None:
        self.finished += 1

    @property
    def entry(self) -> Entry | None:
        return self._ground.run.buckets[Bucket.NODE].get(node_key(self.name))

    @property
    def state(self) -> NodeState:
        assert self.entry is not None
        return decode_as(self.entry.value, NodeState)

    async def leave(self) -> None:
        self.left.set()
        await self.work


def a_state(node: str, public_key: str) -> NodeState:
    return NodeState(
        run=RUN, node=node, roles=("sampler",), public_key=public_key, host="h", started_at=1.0, clock=GENESIS
    )


@in_virtual_time
async def test_presence_appears_with_what_the_node_holds_and_disappears_when_it_leaves(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Present(ground, "sampler-1")
    await ground.clock.sleep(0.1)
    assert (node.state.roles, node.state.detail) == (("sampler",), {"device": "cpu"})
    assert (node.state.clock, node.state.busy) == (GENESIS, 0)
    node.now = Doing(a_clock(a=3), 2, (a_clock(a=1),))
    await ground.clock.sleep(RENEW_S)
    assert (node.state.clock, node.state.busy) == (a_clock(a=3), 2)
    await node.leave()
    assert node.entry is None


@in_virtual_time
async def test_presence_is_renewed_for_as_long_as_the_node_lives(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Present(ground, "sampler-1")
    for _ in range(10):
        await ground.clock.sleep(TTL_S)
        assert node.entry is not None
    await node.leave()


@in_virtual_time
async def test_presence_of_a_node_that_dies_expires(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Present(ground, "sampler-1")
    await ground.clock.sleep(0.1)
    node.work.cancel()
    await ground.clock.sleep(TTL_S - 1)
    assert node.entry is not None
    await ground.clock.sleep(1)
    assert node.entry is None


@in_virtual_time
async def test_presence_survives_an_absent_broker_and_returns_with_it(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Present(ground, "sampler-1")
    await ground.clock.sleep(0.1)
    node.bus.away = True
    await ground.clock.sleep(2 * TTL_S)
    assert node.entry is None
    node.bus.away = False
    await ground.clock.sleep(2 * RENEW_S)
    assert node.entry is not None
    node.bus.away = True
    await node.leave()  # does not wait for a broker that is gone


@in_virtual_time
async def test_nodes_learn_each_others_keys(tmp_path: Path):
    ground = Ground(tmp_path)
    nodes = [Present(ground, name) for name in ("a", "b")]
    await ground.clock.sleep(2 * RENEW_S)
    for node in nodes:
        assert node.presence.key_of("a") == an_identity("a").public_key
        assert node.presence.key_of("b") == an_identity("b").public_key
        assert node.presence.key_of("c") is None
    await asyncio.gather(*(node.leave() for node in nodes))


@in_virtual_time
@pytest.mark.parametrize("fault", ["another signer", "another key", "no message"])
async def test_a_presence_that_is_not_its_nodes_own_is_not_believed(tmp_path: Path, fault: str):
    ground = Ground(tmp_path)
    victim, stranger = an_identity("victim"), Identity.deterministic("stranger")
    frames = {
        "another signer": ("victim", encode(a_state("victim", victim.public_key), stranger)),
        "another key": ("mallory", encode(a_state("victim", stranger.public_key), stranger)),
        "no message": ("victim", b"rubbish"),
    }
    where, frame = frames[fault]
    await ground.bus("mallory").put(Bucket.NODE, node_key(where), frame)
    node = Present(ground, "sampler-1")
    await ground.clock.sleep(2 * RENEW_S)
    assert node.presence.key_of("victim") is None
    assert node.presence.key_of("sampler-1") is not None
    await node.leave()


@in_virtual_time
async def test_presence_tells_when_the_run_is_finished_and_not_before(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Present(ground, "sampler-1")
    await ground.clock.sleep(2 * RENEW_S)
    assert node.finished == 0
    await ground.bus().put(Bucket.RUN, FINISHED_KEY, b"1")
    await ground.clock.sleep(1.5 * RENEW_S)
    assert node.finished >= 1
    await node.leave()
