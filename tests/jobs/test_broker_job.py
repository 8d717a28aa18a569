"""The broker's job: open to who has a login, the same run after its disk is lost, over when the run is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from node.broker_access import BrokerAccess
from node.broker_accounts import Keys
from node.broker_wait import wait_for_port
from node.identity_file import own_identity
from node.invitation import Invitation
from node.job_broker import Listening, serve, start_open_broker, with_pins_of
from node.job_logins import invitation, operator_login
from node.nats_bus import NatsBus
from node.run_bus import wait_for_run
from node.runs import pin_run
from node.settings import Environment, Places, Role, read_environment
from node.system_clock import SystemClock
from protocol.errors import BusError, OperatorError
from protocol.identity import Identity
from protocol.runspec import RunSpec
from protocol.subjects import FINISHED_KEY, Bucket, head_key, node_key, standing_key
from tests.jobs.conftest import RUN_FILE
from tests.jobs.machines import free_port

KEYS = Keys.generate()


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
    return an_environment(home, identity_seed=seed, broker_keys=KEYS.model_dump_json())


def an_environment(home: Path, **said: Any) -> Environment:
    return Environment(Places(home), None, None, None, cores=1, load=0.0, **said)


class Served:
    """A broker's job in this process."""

    def __init__(self, environment: Environment, spec: RunSpec) -> None:
        self.port, self.websocket = free_port(), free_port()
        self.broker = start_open_broker(environment, Listening(self.port, self.websocket), spec.name)
        self.stop = asyncio.Event()
        self.work = asyncio.create_task(serve(self.broker, environment, spec, self.port, self.stop))

    async def enter(self, role: Role, node: str, keys: Keys = KEYS, scheme: str = "nats") -> NatsBus:
        """By an invitation that was made elsewhere."""
        port = self.port if scheme == "nats" else self.websocket
        word = invitation(keys, "sums", role, node, f"{scheme}://127.0.0.1:{port}").word()
        invited = Invitation.parse(word)
        home = self.broker.state_dir / node
        return await NatsBus.connect(invited.access(invited.save(home)), "sums", node=node)

    async def owner(self) -> NatsBus:
        """By the login that the launching machine keeps."""
        file = self.broker.state_dir / "owner.creds"
        file.write_text(operator_login(KEYS))
        url = f"nats://127.0.0.1:{self.port}"
        return await NatsBus.connect(BrokerAccess(url, credentials=file), "sums", node="operator")


async def spec_at(bus: NatsBus) -> RunSpec:
    return RunSpec.model_validate_json((await wait_for_run(bus, "sums", SystemClock())).spec_json)


# nats-py 2.16 opens WebSockets with a parameter that aiohttp 3.14 would rather see written otherwise.
@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")
async def test_run_is_served_to_the_group_and_to_outsiders_until_it_is_finished(
    tmp_path: Path, spec: RunSpec
):
    served = Served(a_machine(tmp_path / "first", models=True), spec)
    try:
        inside = await served.enter("learner", "learner-1")
        outside = await served.enter("sampler", "sampler-guest-1", scheme="ws")
        found = await spec_at(inside)
        assert found == await spec_at(outside)
        assert found.model.revision
        with pytest.raises(OperatorError, match="refused the login"):
            await served.enter("sampler", "sampler-1", Keys.generate())
        await inside.put(Bucket.RUN, FINISHED_KEY, b"1")
        assert await served.work is True
        await inside.close()
        await outside.close()
    finally:
        served.broker.stop()


async def test_the_login_of_a_job_does_what_its_own_slot_may_and_nothing_else(tmp_path: Path, spec: RunSpec):
    served = Served(a_machine(tmp_path / "first", models=True), spec)
    try:
        owner, sampler = await served.owner(), await served.enter("sampler", "sampler-100")
        await spec_at(sampler)
        before = {bucket: await owner.list(bucket, "") for bucket in (Bucket.RUN, Bucket.POLICY)}
        await sampler.put(Bucket.NODE, node_key("sampler-100"), b"here")
        for bucket, key in (
            (Bucket.NODE, node_key("sampler-1")),
            (Bucket.POLICY, head_key("learner-1")),
            (Bucket.RUN, FINISHED_KEY),
            (Bucket.RUN, standing_key("U")),
        ):
            with pytest.raises(BusError):
                await sampler.put(bucket, key, b"mine")
        assert {bucket: await owner.list(bucket, "") for bucket in before} == before
        assert list(await owner.list(Bucket.NODE, "node")) == [node_key("sampler-100")]
        await sampler.close()
        await owner.close()
        served.stop.set()
        await served.work
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
            bus = await served.enter("verifier", "verifier-1")
            specs.append(await spec_at(bus))
            await bus.close()
            served.stop.set()
            assert await served.work is False
        finally:
            served.broker.stop()
    assert specs[0] == specs[1]
    assert not machine.places.models.exists()


async def test_other_settings_under_the_same_name_are_refused(tmp_path: Path, spec: RunSpec):
    first = Served(a_machine(tmp_path / "first", models=True), spec)
    bus = await first.owner()
    await spec_at(bus)
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


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({}, "GRPO_BROKER_KEYS is not set"),
        ({"broker_keys": '{"operator": "s3cret"}'}, "GRPO_BROKER_KEYS holds no broker's keys"),
    ],
)
def test_broker_without_its_keys_is_not_opened(tmp_path: Path, said: dict[str, str], fault: str):
    with pytest.raises(OperatorError, match=fault) as caught:
        start_open_broker(an_environment(tmp_path, **said), Listening(free_port(), None), "sums")
    assert "s3cret" not in str(caught.value)
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
