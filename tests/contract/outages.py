"""Brokers that are killed, lose their disk, or lose an answer: the model and a real nats-server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from node.broker import Broker, start_broker
from node.broker_access import BrokerAccess
from node.memory_broker import MemoryBroker, MemoryRun
from node.memory_bus import MemoryBus
from node.nats_bus import NatsBus
from node.run_bus import RunBus
from node.system_clock import SystemClock
from protocol.errors import BrokerAbsent, BusError, UnknownOutcome
from protocol.ports import QueueDepth
from protocol.subjects import Queue
from tests.build import RUN, a_runspec
from tests.contract.brokers import eventually

T = TypeVar("T")

ACK_WAIT_S = 1.0
SPEC = a_runspec(sampling={"max_new_tokens": 5, "ack_wait_s": ACK_WAIT_S})


class Place(Protocol):
    """A broker in somebody's hands. Its buses reconnect by themselves."""

    async def bus(self, node: str = "node-1") -> RunBus:
        """One more node; it does not create the run."""
        ...

    async def kill(self) -> None:
        """SIGKILL."""
        ...

    async def start(self, *, empty: bool = False) -> None:
        """Start it again, on its directory or on an empty one."""
        ...

    async def lose_answer(self, bus: RunBus, part: bytes) -> None:
        """The next answer to ``bus`` that holds ``part`` never arrives, though what it says is so."""
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...


class ModelBus(MemoryBus):
    """A MemoryBus whose broker may be away, and whose next answer may be lost."""

    def __init__(self, place: ModelPlace, node: str) -> None:
        super().__init__(place.broker, RUN, node=node)
        self._place = place
        self.loses_answer = False

    @property
    def connected(self) -> bool:
        """Whether the broker is there."""
        return super().connected and not self._place.away

    async def ask(self, effect: Callable[[MemoryRun], T]) -> T:
        """One request."""
        await asyncio.sleep(0)
        if self._place.away:
            raise BrokerAbsent("the broker is away")
        result = await super().ask(effect)
        if self.loses_answer:
            self.loses_answer = False
            raise UnknownOutcome("the answer was lost")
        return result


class ModelPlace:
    """The broker in memory."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(SystemClock())
        self.away = False
        self._buses: list[ModelBus] = []

    async def bus(self, node: str = "node-1") -> ModelBus:
        bus = ModelBus(self, node)
        self._buses.append(bus)
        return bus

    async def kill(self) -> None:
        self.away = True

    async def start(self, *, empty: bool = False) -> None:
        self.away = False
        if empty:
            self.broker.lose_disk()
        else:
            self.broker.restart()

    async def lose_answer(self, bus: RunBus, part: bytes) -> None:
        assert isinstance(bus, ModelBus)
        bus.loses_answer = True

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


class Wire:
    """A way to the server on which an answer may be lost, with the connection."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._port = 0
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._ends: list[asyncio.StreamWriter] = []
        self.lost_part: bytes | None = None

    async def open(self) -> str:
        """Begin to forward, where it was last time; returns the URL."""
        self._server = await asyncio.start_server(self._on_client, "127.0.0.1", self._port)
        host, self._port = self._server.sockets[0].getsockname()
        return f"nats://{host}:{self._port}"

    async def close(self) -> None:
        """Cut every connection and refuse new ones."""
        assert self._server is not None
        self._server.close()
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()
        if self._pumps:
            await asyncio.wait(self._pumps)
        await asyncio.sleep(0)  # the transports say that they are lost

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection(*self._target)
        ends = (writer, to_server[1])
        self._ends += ends
        for source, sink, answers in ((reader, to_server[1], False), (to_server[0], writer, True)):
            pump = asyncio.create_task(self._pump(source, sink, ends, answers=answers))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        *,
        answers: bool,
    ) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if answers and self.lost_part is not None and self.lost_part in data:
                    self.lost_part = None
                    break
                sink.write(data)
                await sink.drain()
        for end in ends:
            end.transport.abort()


class ServerPlace:
    """A real nats-server; each node comes to it by a wire of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._broker: Broker = start_broker(directory)
        self._buses: list[NatsBus] = []
        self._wires: dict[int, Wire] = {}

    async def bus(self, node: str = "node-1") -> NatsBus:
        url = urlsplit(self._broker.url)
        assert url.hostname is not None
        assert url.port is not None
        wire = Wire(url.hostname, url.port)
        access = BrokerAccess(await wire.open(), token=self._broker.token)
        bus = await NatsBus.connect(access, RUN, node=node)
        self._buses.append(bus)
        self._wires[id(bus)] = wire
        return bus

    async def kill(self) -> None:
        assert self._broker.process is not None
        self._broker.process.kill()
        self._broker.process.wait()
        for wire in self._wires.values():
            await wire.close()

    async def start(self, *, empty: bool = False) -> None:
        if empty:
            shutil.rmtree(self._directory / "jetstream")
        self._broker = start_broker(self._directory)
        for wire in self._wires.values():
            await wire.open()

    async def lose_answer(self, bus: RunBus, part: bytes) -> None:
        self._wires[id(bus)].lost_part = part

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        if self._broker.alive:
            await self.kill()


async def back(bus: RunBus) -> None:
    """Wait until the node has found its broker again."""

    async def answers() -> bool:
        try:
            await bus.exists()
        except BusError:
            return False
        return True

    await eventually(answers)


async def is_depth(bus: RunBus, pending: int, unacknowledged: int) -> bool:
    return await bus.depth(Queue.ROLLOUT) == QueueDepth(pending, unacknowledged)
