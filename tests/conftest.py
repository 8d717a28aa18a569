"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import structlog

from tests.hub.server import HubServer
from tests.hub.standin import running

if TYPE_CHECKING:
    from tests.vllm_real import RealServer

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


SLOW = (
    "bench/",
    "contract/test_broker_disk_loss.py",
    "contract/test_broker_model.py",
    "contract/test_store_damage.py",
    "hub/",
    "isolation/",
    "jobs/",
    "node/test_engines.py",
    "roles/verifier/rewards/test_pool.py",
    "roles/verifier/test_audit_attacks.py",
    "sim/test_many_learners.py",
    "sim/test_planted_bugs.py",
)
"""What takes longest, all of it servers, processes and storms; measured with ``--durations=0``."""


VLLM_S = 900
"""For a test of vLLM: a server starts in a minute, and in several on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whatever lies at ``SLOW``, and give whoever may start a vLLM server the time for it."""
    here = Path(__file__).parent
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.timeout(VLLM_S), append=False)
        if item.path.relative_to(here).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)


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


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """vLLM on a small model: one server for all tests that need no other."""
    from tests.engine_rigs import a_small_model
    from tests.vllm_real import PYTHON, real_server, with_a_tokenizer

    if not PYTHON.is_file():
        pytest.skip("vLLM is not installed here: just test-vllm")
    directory = tmp_path_factory.mktemp("vllm")
    model_dir = with_a_tokenizer(a_small_model(directory / "model", head_dim=32))
    with real_server(model_dir, directory / "server.log") as server:
        yield server
