"""What every end-to-end test starts from: a home with the tiny model in it, and small runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.demo import demo_spec
from node.runs import pin_run
from node.settings import Environment, Places, prepare_process, read_environment
from protocol.runspec import RunSpec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def environment() -> Environment:
    """This machine, with the tiny model where the demo keeps it, so that it is made only once."""
    prepare_process(1)
    return replace(read_environment(), places=Places(read_environment().places.home))


@pytest.fixture
def small_run(environment: Environment, tmp_path: Path) -> Callable[..., RunSpec]:
    """The demo's run with other settings: ``small_run(learner={"updates": 6})``, pinned."""

    def make(directory: Path = tmp_path, **groups: dict[str, Any]) -> RunSpec:
        spec = demo_spec(0, 12, directory / "store").model_dump()
        spec["eval"] |= {"every": 0, "problems": 0}
        for name, changes in groups.items():
            spec[name] |= changes
        return pin_run(RunSpec.model_validate(spec), environment.places.models)

    return make
