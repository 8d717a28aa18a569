"""A bucket on the stand-in, and no faults left over from the test before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.stores import HubWorld
from tests.hub.server import PAGE, HubServer


@pytest.fixture
def world(hub_server: HubServer, tmp_path: Path) -> Iterator[HubWorld]:
    hub_server.requests.clear()
    yield HubWorld(tmp_path, hub_server)
    hub_server.faults.clear()
    hub_server.page = PAGE
