"""The adapters under contract, as fixtures."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from node.broker import Broker, start_broker
from node.nats_bus import NatsBus
from node.run_bus import RunBus
from protocol.subjects import Names
from tests.contract.brokers import Hub, memory_hub, nats_hub
from tests.contract.outages import SPEC, ModelPlace, Place, ServerPlace
from tests.contract.stores import WORLDS, BackDoor, FileWorld, HubWorld, MemoryWorld, NatsWorld, World
from tests.engine_rigs import FakeRig, Rig, TransformersRig, a_small_model
from tests.vllm_rigs import STUB_SHAPES, VllmRig
from tests.vllm_stub import StubModel, StubServer

MakeRig = Callable[[str], Awaitable[Rig]]

_NUMBERS = itertools.count(1)


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "nats":
        access = request.getfixturevalue("nats_server").access
        run = f"stored-{next(_NUMBERS)}"
        bus = await NatsBus.connect(access, run, node="node-1")
        await bus.create_adapter_store()
        yield NatsWorld(tmp_path, bus, BackDoor(access, Names(run).adapter_bucket))
        await bus.close()
    elif request.param == "hub":
        yield HubWorld(tmp_path, request.getfixturevalue("hub_server"))
    else:
        yield FileWorld(tmp_path) if request.param == "file" else MemoryWorld(tmp_path)


@contextmanager
def memory_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that needs no disk where the system has one: making a run is many small files."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path_factory.mktemp("broker")
        return
    with TemporaryDirectory(dir="/dev/shm", prefix="grpo-test-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with memory_directory(tmp_path_factory) as directory:
        broker = start_broker(directory)
        yield broker
        assert broker.process is not None
        broker.process.kill()  # it would tidy up hundreds of streams that nobody needs
        broker.process.wait()


@pytest.fixture(params=["memory", "nats"])
async def hub(request: pytest.FixtureRequest) -> AsyncIterator[Hub]:
    hub = memory_hub() if request.param == "memory" else nats_hub(request.getfixturevalue("nats_server"))
    yield hub
    await hub.close()


@pytest.fixture(params=["memory", "nats"])
async def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Place]:
    with memory_directory(tmp_path_factory) as directory:
        place: Place = ModelPlace() if request.param == "memory" else ServerPlace(directory / "broker")
        yield place
        await place.close()


@pytest.fixture
async def bus(place: Place) -> RunBus:
    bus = await place.bus()
    await bus.create_run(SPEC)
    return bus


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return a_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def make_rig(request, tmp_path) -> AsyncIterator[MakeRig]:
    """Makes rigs whose engines hold no policy."""
    async with AsyncExitStack() as stack:

        async def make(kind: str) -> Rig:
            if kind == "vllm-stub":
                stub = await stack.enter_async_context(StubServer(StubModel()))
                return await VllmRig.open(stub.url, STUB_SHAPES, tmp_path)
            if kind == "vllm":
                server = request.getfixturevalue("vllm_server")
                return await VllmRig.open(server.url, server.shapes, tmp_path)
            return FakeRig() if kind == "fake" else TransformersRig(request.getfixturevalue("model_dir"))

        yield make
