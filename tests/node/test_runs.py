"""Runs: pinned before they are created, created once, and again over the store that is left of one."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from node.nats_bus import NatsBus
from node.runs import create_run, pin_run, read_run_file
from node.settings import read_environment
from node.stores import open_store
from protocol.codec import decode_as
from protocol.errors import OperatorError
from protocol.messages import RunState
from protocol.runspec import RunSpec
from protocol.subjects import SPEC_KEY, Bucket
from tests.build import RUN, a_runspec, an_identity
from tests.node.sites import Site


class Creator:
    """Whoever creates the run at a broker, with a store in ``directory``."""

    def __init__(self, site: Site, directory: Path, name: str = "creator") -> None:
        self._site = site
        self._directory = directory
        self._name = name

    def spec(self, **changes: Any) -> RunSpec:
        return a_runspec(store={"url": (self._directory / "store").as_uri()}, **changes)

    async def create(self, **changes: Any) -> bool:
        bus = await self.bus()
        try:
            cache = self._directory / "cache"
            return await create_run(bus, self.spec(**changes), an_identity(self._name), cache)
        finally:
            await bus.close()

    async def bus(self) -> NatsBus:
        return await NatsBus.connect(self._site.broker.access, RUN, node=self._name)

    async def state(self) -> RunState:
        bus = await self.bus()
        try:
            entry = await bus.get(Bucket.RUN, SPEC_KEY)
        finally:
            await bus.close()
        assert entry is not None
        return decode_as(entry.value, RunState)


async def test_a_run_is_stored_at_the_broker_and_in_a_store_that_is_made(site: Site, tmp_path: Path):
    creator = Creator(site, tmp_path)
    assert not (tmp_path / "store").exists()
    assert await creator.create()
    spec = creator.spec()
    state = await creator.state()
    assert RunSpec.model_validate_json(state.spec_json) == spec
    assert (state.spec_digest, state.creator) == (spec.digest, "creator")
    assert await open_store(spec.store, tmp_path / "cache").list(RUN) == [f"{RUN}/run-{spec.digest}"]


async def test_a_run_created_twice_is_the_same_run_by_whomever(site: Site, tmp_path: Path):
    first, second = (Creator(site, tmp_path, name) for name in ("creator", "another"))
    assert await first.create()
    assert not await first.create()
    assert not await second.create()
    assert (await second.state()).creator == "creator"


async def test_other_settings_under_the_name_of_a_run_are_refused_and_change_nothing(
    site: Site, tmp_path: Path
):
    creator = Creator(site, tmp_path)
    await creator.create()
    with pytest.raises(OperatorError, match="with other settings exists; choose another name") as refused:
        await creator.create(seed=1)
    assert "\n" not in str(refused.value)
    assert (await creator.state()).spec_digest == creator.spec().digest


@pytest.mark.parametrize("name", ["creator", "another"])
async def test_a_run_whose_broker_lost_its_disk_can_be_created_again_over_its_store(
    site: Site, tmp_path: Path, name: str
):
    await Creator(site, tmp_path).create()
    site.end(signal.SIGTERM)
    shutil.rmtree(tmp_path / "broker")
    site.start()
    again = Creator(site, tmp_path, name)
    assert await again.create()
    assert (await again.state()).creator == name


async def test_a_store_that_cannot_be_made_is_one_line_and_leaves_no_run(site: Site, tmp_path: Path):
    (tmp_path / "store").touch()
    creator = Creator(site, tmp_path)
    with pytest.raises(OperatorError, match=r"store\.url: cannot make"):
        await creator.create()
    bus = await creator.bus()
    assert not await bus.exists()
    await bus.close()


def test_pinning_makes_a_relative_store_absolute_and_fixes_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    models = read_environment().places.models
    pinned = pin_run(a_runspec(store={"url": "a store"}), models)
    assert pinned.store.url == (tmp_path / "a store").as_uri()
    assert pinned.tasks.digest
    assert pinned.model != a_runspec().model
    assert pin_run(pinned, models) == pinned
    assert list(tmp_path.iterdir()) == []


def test_a_run_file_that_cannot_be_read_is_one_line(tmp_path: Path):
    (tmp_path / "bytes.toml").write_bytes(b"name = '\xff'")
    for name, says in (("none.toml", "cannot read the run file"), ("bytes.toml", "not UTF-8 text")):
        with pytest.raises(OperatorError, match=says) as refused:
            read_run_file(tmp_path / name)
        assert "\n" not in str(refused.value)
