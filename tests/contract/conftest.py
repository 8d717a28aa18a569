"""The adapters under contract, as fixtures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from node.broker import Broker, start_broker
from tests.contract.brokers import Hub, memory_hub, nats_hub
from tests.contract.stores import WORLDS, World


@pytest.fixture(params=list(WORLDS))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return WORLDS[request.param](tmp_path)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = start_broker(tmp_path_factory.mktemp("broker"))
    yield broker
    broker.stop()


@pytest.fixture(params=["memory", "nats"])
async def hub(request: pytest.FixtureRequest) -> AsyncIterator[Hub]:
    hub = memory_hub() if request.param == "memory" else nats_hub(request.getfixturevalue("nats_server"))
    yield hub
    await hub.close()
