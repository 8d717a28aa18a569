"""A broker with accounts, as a fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.isolation.ground import Guarded


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    guarded = await Guarded(tmp_path).open()
    yield guarded
    await guarded.close()
