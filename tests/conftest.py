"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
import structlog

from tests.hub.server import HubServer
from tests.hub.standin import running

# The stock client reads these when it is imported. A cache of uploads must not outlive the stand-in, which
# forgets; nobody's login is used; and faults are retried at once.
_HUB_HOME = TemporaryDirectory(prefix="grpo-test-hub-")
os.environ |= {
    "HF_XET_CACHE": _HUB_HOME.name,
    "HF_TOKEN_PATH": f"{_HUB_HOME.name}/token",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "20ms",
    "HF_XET_CLIENT_READ_TIMEOUT": "2s",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
os.environ.pop("HF_TOKEN", None)


@pytest.fixture(scope="session")
def hub_server() -> Iterator[HubServer]:
    """A Hub for all tests; each makes a bucket of its own."""
    with running(HubServer()) as hub:
        yield hub


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A test that sets up logs, as every command does, leaves nothing of it to the next one."""
    yield
    structlog.reset_defaults()
