"""A node: plays its roles at once, and ends when it should, closing what it opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from node.node import Node, Part
from node.presence import RENEW_S, TTL_S, Presence
from node.runtime import flatten
from node.virtual_time import in_virtual_time
from protocol.codec import decode_as
from protocol.errors import BrokerAbsent
from protocol.messages import NodeState
from protocol.subjects import FINISHED_KEY, Bucket, node_key
from tests.build import a_clock
from tests.ground import Ground

NAME = "node-1"

Play = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


async def until_stopped(stop: asyncio.Event) -> None:
    await stop.wait()


async def crash(_stop: asyncio.Event) -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError("our own bug")


class Played:
    """A running node whose roles are ``plays``; role r knows r's clock at 1 and has one group in hand."""

    def __init__(self, ground: Ground, **plays: Play) -> None:
        self._ground = ground
        self.bus = ground.bus(NAME)
        self.closed: list[str] = []
        ring = ground.ring(NAME, self.bus, "node")
        parts = [self._part(role, play) for role, play in plays.items()]
        node = Node(ring, Presence(ring, tuple(plays), {}), parts)
        self.stop = asyncio.Event()
        self.work = asyncio.create_task(node.run(self.stop))

    def _part(self, role: str, play: Play) -> Part:
        async def close() -> None:
            self.closed.append(role)

        return Part(role, play, lambda: a_clock(**{role: 1}), lambda: 1, close)

    @property
    def state(self) -> NodeState | None:
        entry = self._ground.run.buckets[Bucket.NODE].get(node_key(NAME))
        return None if entry is None else decode_as(entry.value, NodeState)

    async def has_left_the_broker(self) -> bool:
        with pytest.raises(BrokerAbsent, match="left"):
            await self.bus.get(Bucket.RUN, FINISHED_KEY)
        return True


@in_virtual_time
async def test_a_stopped_node_leaves_in_order(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Played(ground, sampler=until_stopped, verifier=until_stopped)
    await ground.clock.sleep(1)
    assert node.state is not None
    assert node.state.roles == ("sampler", "verifier")
    assert (node.state.clock, node.state.busy) == (a_clock(sampler=1, verifier=1), 2)
    assert [fields["played"] for fields in ground.told("role_started")] == ["sampler", "verifier"]
    node.stop.set()
    await node.work
    assert node.state is None
    assert sorted(str(fields["played"]) for fields in ground.told("role_stopped")) == ["sampler", "verifier"]
    assert node.closed == ["sampler", "verifier"]
    assert await node.has_left_the_broker()


@in_virtual_time
async def test_a_finished_run_stops_a_sampler(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Played(ground, sampler=until_stopped)
    await ground.clock.sleep(1)
    await ground.bus().put(Bucket.RUN, FINISHED_KEY, b"1")
    await asyncio.wait_for(node.work, 2 * RENEW_S)
    assert node.closed == ["sampler"]


@in_virtual_time
async def test_a_finished_run_does_not_stop_a_learner_nor_the_roles_beside_it(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Played(ground, learner=until_stopped, sampler=until_stopped)
    await ground.bus().put(Bucket.RUN, FINISHED_KEY, b"1")
    await ground.clock.sleep(10 * RENEW_S)
    assert not node.work.done()
    node.stop.set()
    await node.work


@in_virtual_time
async def test_the_roles_beside_a_learner_end_with_it(tmp_path: Path):
    ground = Ground(tmp_path)

    async def train(_stop: asyncio.Event) -> None:
        await ground.clock.sleep(5)

    node = Played(ground, learner=train, sampler=until_stopped)
    await asyncio.wait_for(node.work, 6)
    assert node.closed == ["learner", "sampler"]


@in_virtual_time
async def test_a_role_that_crashes_ends_the_node_with_that_exception(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Played(ground, sampler=until_stopped, verifier=crash)
    with pytest.raises(ExceptionGroup) as crashed:
        await node.work
    assert [type(cause) for cause in flatten(crashed.value)] == [ZeroDivisionError]
    assert node.closed == ["sampler", "verifier"]
    assert await node.has_left_the_broker()
    await ground.clock.sleep(TTL_S)
    assert node.state is None


@in_virtual_time
async def test_a_cancelled_node_still_closes_what_it_opened(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Played(ground, sampler=until_stopped)
    await ground.clock.sleep(1)
    node.work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await node.work
    assert node.closed == ["sampler"]
    assert await node.has_left_the_broker()


@in_virtual_time
async def test_an_absent_broker_ends_no_node(tmp_path: Path):
    ground = Ground(tmp_path)
    node = Played(ground, sampler=until_stopped)
    node.bus.away = True
    await ground.clock.sleep(10 * TTL_S)
    assert not node.work.done()
    node.stop.set()
    await node.work
    assert node.closed == ["sampler"]
