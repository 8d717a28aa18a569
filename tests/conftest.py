"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from tests.vllm_real import RealServer


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
