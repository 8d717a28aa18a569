"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A test that sets up logs, as every command does, leaves nothing of it to the next one."""
    yield
    structlog.reset_defaults()
