"""The broker's job: open to who has the token, the same run after its disk is lost, over when the run is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.broker_access import BrokerAccess
from node.broker_wait import wait_for_port
from node.identity_file import own_identity
from node.job_broker import Listening, serve, start_open_broker, with_pins_of
from node.nats_bus import NatsBus
from node.run_bus import wait_for_run
from node.runs import pin_run
from node.settings import Environment, Places, read_environment
from node.system_clock import SystemClock
from protocol.errors import OperatorError
from protocol.identity import Identity
from protocol.runspec import RunSpec
from protocol.subjects import FINISHED_KEY, Bucket
from tests.jobs.conftest import RUN_FILE
from tests.jobs.machines import free_port

TOKEN = "let-me-in"


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    text = RUN_FILE.replace("hf://buckets/alice/grpo", (tmp_path / "store").as_uri())
    return RunSpec.from_toml(text.replace("[store]", "[sampling]\nmax_new_tokens = 5\n[store]"), "test")


def a_machine(home: Path, *, models: bool) -> Environment:
    """A machine that has just been started, with or without the tiny model on it."""
    home.mkdir()
    if models:
        there = read_environment().places.models
        there.mkdir(parents=True, exist_ok=True)
        (home / "models").symlink_to(there)
    seed = Identity.deterministic("operator").seed.decode()
    return Environment(Places(home), None, TOKEN, None, cores=1, load=0.0, identity_seed=seed)


class Served:
    """A broker's job in this process."""

    def __init__(self, environment: Environment, spec: RunSpec) -> None:
        self.port, self.websocket = free_port(), free_port()
        self.broker = start_open_broker(environment, Listening(self.port, self.websocket))
        self.stop = asyncio.Event()
        self.work = asyncio.create_task(serve(self.broker, environment, spec, self.port, self.stop))

    async def run(self, scheme: str = "nats", token: str = TOKEN) -> tuple[NatsBus, RunSpec]:
        port = self.port if scheme == "nats" else self.websocket
        access = BrokerAccess(f"{scheme}://127.0.0.1:{port}", token=token)
        bus = await NatsBus.connect(access, "sums", node="sampler-1")
        state = await wait_for_run(bus, "sums", SystemClock())
        return bus, RunSpec.model_validate_json(state.spec_json)


# nats-py 2.16 opens WebSockets with a parameter that aiohttp 3.14 would rather see written otherwise.
@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")
async def test_run_is_served_to_the_group_and_to_outsiders_until_it_is_finished(
    tmp_path: Path, spec: RunSpec
):
    served = Served(a_machine(tmp_path / "first", models=True), spec)
    try:
        inside, found = await served.run()
        outside, same = await served.run("ws")
        assert found == same
        assert found.model.revision
        with pytest.raises(OperatorError, match="refused the login"):
            await served.run(token="guessed")
        await outside.put(Bucket.RUN, FINISHED_KEY, b"1")
        assert await served.work is True
        await inside.close()
        await outside.close()
    finally:
        served.broker.stop()


async def test_broker_without_its_disk_serves_what_was_pinned_and_needs_no_model_for_it(
    tmp_path: Path, spec: RunSpec
):
    specs = []
    for name, models in (("first", True), ("second", False)):
        machine = a_machine(tmp_path / name, models=models)
        served = Served(machine, spec)
        try:
            bus, found = await served.run()
            specs.append(found)
            await bus.close()
            served.stop.set()
            assert await served.work is False
        finally:
            served.broker.stop()
    assert specs[0] == specs[1]
    assert not machine.places.models.exists()


async def test_other_settings_under_the_same_name_are_refused(tmp_path: Path, spec: RunSpec):
    first = Served(a_machine(tmp_path / "first", models=True), spec)
    bus, _ = await first.run()
    await bus.close()
    first.stop.set()
    await first.work
    first.broker.stop()
    machine = a_machine(tmp_path / "second", models=True)
    other = Served(machine, spec.model_copy(update={"seed": 9}))
    try:
        with pytest.raises(OperatorError, match="with other settings exists; choose another"):
            async with asyncio.timeout(60):
                await other.work
    finally:
        other.broker.stop()


def test_pins_fill_only_what_the_run_file_leaves_open(spec: RunSpec, tmp_path: Path):
    pinned = pin_run(spec, read_environment().places.models)
    assert with_pins_of(spec, pinned) == pinned
    own = spec.model_copy(update={"model": spec.model.model_copy(update={"revision": "mine"})})
    assert with_pins_of(own, pinned).model.revision == "mine"


def test_broker_without_a_token_is_not_opened(tmp_path: Path):
    environment = Environment(Places(tmp_path), None, None, None, cores=1, load=0.0)
    with pytest.raises(OperatorError, match="GRPO_TOKEN is not set"):
        start_open_broker(environment, Listening(free_port(), None))
    assert list(tmp_path.iterdir()) == []


async def test_who_is_early_waits_for_the_broker():
    port = free_port()
    access = BrokerAccess(f"nats://127.0.0.1:{port}")
    with capture_logs() as logs:
        waiting = asyncio.create_task(wait_for_port(access, pause_s=0.01))
        while not logs:
            await asyncio.sleep(0)
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", port)
        async with asyncio.timeout(10), server:
            await waiting
    assert [entry["event"] for entry in logs] == ["waiting_for_broker"]


async def test_who_waits_in_vain_is_told_so_in_the_end():
    access = BrokerAccess(f"nats://no-such-host.invalid:{free_port()}")
    with pytest.raises(OperatorError, match=r"no broker at nats://no-such-host.invalid:\d+ after 0.2 s \("):
        await wait_for_port(access, deadline_s=0.2, pause_s=0.05)


def test_key_that_comes_as_a_secret_is_the_nodes_and_lies_on_no_disk(tmp_path: Path):
    seed = Identity.generate("learner-1").seed.decode()
    environment = read_environment({"GRPO_IDENTITY": seed})
    assert seed not in repr(environment)
    file = tmp_path / "identity.nk"
    found = own_identity(file, "learner-1", environment.identity_seed)
    assert found.seed.decode() == seed
    assert not file.exists()
    with pytest.raises(OperatorError, match="GRPO_IDENTITY holds no user nkey seed") as caught:
        own_identity(file, "learner-1", "SUNOTASEED")
    assert "SUNOTASEED" not in str(caught.value)
