"""A real broker that tests end, freeze, starve and start again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from node.broker import Broker, start_broker
from node.broker_access import BrokerAccess
from node.broker_config import BrokerOptions
from node.nats_bus import NatsBus
from node.nats_pull import NatsConsumer
from protocol.errors import BusError
from protocol.ports import Delivery
from tests.build import RUN, a_runspec

ACK_WAIT_S = 1.0
SPEC = a_runspec(sampling={"max_new_tokens": 5, "ack_wait_s": ACK_WAIT_S})


class Site:
    """A broker that can be ended and started again, with the run on it."""

    def __init__(self, directory: Path, **options: object) -> None:
        self._directory = directory
        self._options = BrokerOptions(**options)  # type: ignore[arg-type]
        self._buses: list[NatsBus] = []
        self.broker = self.start()

    def start(self) -> Broker:
        self.broker = start_broker(self._directory, options=self._options)
        return self.broker

    def end(self, how: signal.Signals) -> None:
        assert self.broker.process is not None
        self.broker.process.send_signal(how)
        self.broker.process.wait()

    def freeze(self) -> None:
        assert self.broker.process is not None
        self.broker.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.broker.pid, os.WSTOPPED | os.WNOWAIT)  # it takes a moment

    def thaw(self) -> None:
        assert self.broker.process is not None
        self.broker.process.send_signal(signal.SIGCONT)

    async def bus(self, node: str = "node-1", access: BrokerAccess | None = None) -> NatsBus:
        bus = await NatsBus.connect(access or self.broker.access, RUN, node=node)
        self._buses.append(bus)
        await bus.create_run(SPEC)
        return bus

    async def close(self) -> None:
        self.thaw()
        for bus in self._buses:
            await bus.close()
        self.broker.stop()


async def soon(consumer: NatsConsumer, within_s: float = 10.0) -> Delivery:
    async with asyncio.timeout(within_s):
        return await consumer.next()


async def persist(
    call: Callable[[], Awaitable[object]], tries: int = 100, retry: type[BusError] = BusError
) -> None:
    """What a role does: try again until it works."""
    for _ in range(tries):
        try:
            await call()
        except retry:
            await asyncio.sleep(0)
        else:
            return


@asynccontextmanager
async def fake_server(greeting: bytes) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """Greets, answers the first PING, then never reads again."""
    connections: list[asyncio.StreamWriter] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(greeting)
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"PING\r\n")
            writer.write(b"PONG\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections
    finally:
        server.close()
        for writer in connections:
            writer.transport.abort()
