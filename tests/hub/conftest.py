"""A Hub of one's own: requests that nobody waits for any more must not meet the next test's faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.stores import HubWorld
from tests.hub.server import HubServer
from tests.hub.standin import running


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HubWorld]:
    with running(HubServer()) as hub:
        yield HubWorld(tmp_path, hub)
