"""The buses under contract: one in memory, one on a real nats-server; and patience with both."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from node.broker import Broker
from node.memory_broker import MemoryBroker
from node.memory_bus import MemoryBus
from node.nats_bus import NatsBus
from node.run_bus import RunBus
from node.system_clock import SystemClock
from protocol.limits import QUEUE_MESSAGES_MAX
from protocol.ports import Consumer, Delivery
from tests.build import a_runspec

ACK_WAIT_S = 0.5
PATIENCE_S = 10.0
_NUMBERS = itertools.count(1)


class Hub:
    """One broker with one fresh run; every ``bus`` is a node of its own and leaves when the test ends."""

    def __init__(self, connect: Callable[[str, str], Awaitable[RunBus]]) -> None:
        self._connect = connect
        self._stack = AsyncExitStack()
        self.spec = a_runspec(
            name=f"run-{next(_NUMBERS)}", sampling={"max_new_tokens": 5, "ack_wait_s": ACK_WAIT_S}
        )

    async def bus(self, node: str = "node-1", *, messages_max: int = QUEUE_MESSAGES_MAX) -> RunBus:
        """A node on the run, which exists from the first call on."""
        bus = await self.stranger(node)
        if not await bus.exists():
            await bus.create_run(self.spec, queue_messages_max=messages_max)
        return bus

    async def stranger(self, node: str = "node-1") -> RunBus:
        """A node that does not create the run."""
        bus = await self._connect(self.spec.name, node)
        self._stack.push_async_callback(bus.close)
        return bus

    async def close(self) -> None:
        await self._stack.aclose()


def memory_hub() -> Hub:
    broker = MemoryBroker(SystemClock())

    async def connect(run: str, node: str) -> RunBus:
        return MemoryBus(broker, run, node=node)

    return Hub(connect)


def nats_hub(server: Broker) -> Hub:
    async def connect(run: str, node: str) -> RunBus:
        return await NatsBus.connect(server.access, run, node=node)

    return Hub(connect)


async def soon(consumer: Consumer) -> Delivery:
    """The next delivery, which must come."""
    async with asyncio.timeout(PATIENCE_S):
        return await consumer.next()


async def nothing_within(consumer: Consumer, seconds: float) -> bool:
    """Whether no delivery comes for so long."""
    try:
        async with asyncio.timeout(seconds):
            delivery = await consumer.next()
    except TimeoutError:
        return True
    await delivery.release()
    return False


async def eventually(happened: Callable[[], Awaitable[bool]], within_s: float = PATIENCE_S) -> None:
    """Ask until the answer is yes; for what a broker does by itself and announces to nobody."""
    async with asyncio.timeout(within_s):
        while not await happened():
            await asyncio.sleep(0.02)
