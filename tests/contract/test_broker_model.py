"""The broker in memory, on which every simulation stands, held to the real one.

Seeded scripts are played on both, and two nodes must observe the same: results, errors, deliveries and
their order, depths, revisions, keys and announcements. Where they differ, the server is right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest

from node.broker import Broker
from node.memory_broker import MemoryBroker
from node.memory_bus import MemoryBus
from node.nats_bus import NatsBus
from node.system_clock import SystemClock
from node.virtual_time import VirtualClock, simulate
from protocol.runspec import RunSpec
from tests.build import a_runspec
from tests.contract.player import Player
from tests.contract.scripts import ACK_WAIT_S, MESSAGES_MAX, NODES, STORIES, Step, key_script, queue_script

SEEDS = range(16)
AT_ONCE = 16
SCRIPTS: dict[str, Callable[[int], list[Step]]] = {"queue": queue_script, "keys": key_script}
NAMES = [*STORIES, *(f"{kind}-{seed}" for seed in SEEDS for kind in SCRIPTS)]


def script(name: str) -> list[Step]:
    if name in STORIES:
        return STORIES[name]
    kind, _, seed = name.partition("-")
    return SCRIPTS[kind](int(seed))


async def on_the_model(name: str) -> Player:
    broker = MemoryBroker(VirtualClock())
    buses = {node: MemoryBus(broker, name, node=node) for node in NODES}
    await buses[NODES[0]].create_run(a_run(name), queue_messages_max=MESSAGES_MAX)
    player = Player(dict(buses), broker.clock)
    await player.play(script(name))
    return player


async def on_the_server(server: Broker, models: dict[str, Player]) -> dict[str, Player]:
    """Many scripts at once, for what takes time is waiting; not all, for a late step is another step."""
    players: dict[str, Player] = {}
    for start in range(0, len(NAMES), AT_ONCE):
        async with AsyncExitStack() as stack:
            some = {
                name: await player_on(server, name, models[name], stack)
                for name in NAMES[start : start + AT_ONCE]
            }
            await asyncio.gather(*(player.play(script(name)) for name, player in some.items()))
            players |= some
    return players


async def player_on(server: Broker, name: str, model: Player, stack: AsyncExitStack) -> Player:
    buses = {node: await NatsBus.connect(server.access, name, node=node) for node in NODES}
    for bus in buses.values():
        stack.push_async_callback(bus.close)
    await buses[NODES[0]].create_run(a_run(name), queue_messages_max=MESSAGES_MAX)
    return Player(dict(buses), SystemClock(), model)


def a_run(name: str) -> RunSpec:
    return a_runspec(name=name, sampling={"max_new_tokens": 5, "ack_wait_s": ACK_WAIT_S})


@pytest.fixture(scope="module")
def played(nats_server: Broker) -> dict[str, tuple[list[str], list[str]]]:
    """What was observed on the server and on the model."""
    models = {name: simulate(partial(on_the_model, name)) for name in NAMES}
    players = asyncio.run(on_the_server(nats_server, models))
    return {name: (players[name].trace, models[name].trace) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_two_nodes_see_the_model_do_what_the_server_does(
    played: dict[str, tuple[list[str], list[str]]], name: str
):
    server, model = played[name]
    assert server == model
