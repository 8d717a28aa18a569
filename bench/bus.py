"""How many messages does the bus carry a second, and how long does a commit take?

A real nats-server on loopback; publisher and taker share this process, each on its own connection.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from bench.harness import Figure, Goal, report, say
from node.broker import Broker, start_broker
from node.nats_bus import NatsBus
from protocol.ports import Write
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue, done_key, head_key

RUN = "bench"
SIZES = {"2kb": (2 << 10, 4000), "64kb": (64 << 10, 1000), "1mb": (1 << 20, 40)}
"""Payload bytes and messages; the last travels by reference."""
IN_FLIGHT = 64
CREDIT = 64
COMMITS, GROUPS = 100, 8
SPEC = RunSpec.model_validate(
    {
        "name": RUN,
        "model": {"ref": "builtin:tiny"},
        "tasks": {"source": "builtin:sort-digits"},
        "rewards": [{"name": "exact"}],
        "store": {"url": "file:///nowhere"},
    }
)


async def throughput(publisher: NatsBus, taker: NatsBus, size: int, count: int) -> float:
    """Messages a second that are published, confirmed, taken and acknowledged with confirmation."""
    data = bytes(size)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def publish(number: int) -> None:
        async with slots:
            await publisher.publish(Queue.VERIFIED, data, f"{size}-{number}-{time.monotonic_ns()}")

    async def take() -> None:
        consumer = await taker.consume(Queue.VERIFIED, CREDIT)
        async with asyncio.TaskGroup() as acks:
            for _ in range(count):
                acks.create_task((await consumer.next()).ack())
        await consumer.close()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        group.create_task(take())
        for number in range(count):
            group.create_task(publish(number))
    return count / (time.perf_counter() - start)


async def commit_ms(bus: NatsBus) -> list[float]:
    """Times of commits of GROUPS groups and a head of 2 KB."""
    revision, times = 0, []
    for number in range(COMMITS):
        writes = [Write(done_key(f"g{number}-{i}"), b"", 0, ttl_s=3600) for i in range(GROUPS)]
        start = time.perf_counter()
        head = Write(head_key("learner-1"), bytes(2048), revision)
        revision = await bus.commit(Bucket.POLICY, [*writes, head])
        times.append((time.perf_counter() - start) * 1e3)
    return times


async def publish_ms(bus: NatsBus) -> float:
    """Median time of one confirmed publish of 2 KB with nothing else going on."""
    times = []
    for number in range(300):
        start = time.perf_counter()
        await bus.publish(Queue.VERIFIED, bytes(2048), f"m{number}")
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


async def announce_ms(publisher: NatsBus, listener: NatsBus) -> float:
    """Median time from the write of a head to its announcement at another node."""
    heads, times = listener.announcements(), []
    for _ in range(100):
        start = time.perf_counter()
        await publisher.put(Bucket.POLICY, head_key("learner-2"), bytes(2048))
        await anext(heads)
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


async def measure(broker: Broker) -> dict[str, Figure]:
    """All figures."""
    one = await NatsBus.connect(broker.access, RUN, node="one")
    other = await NatsBus.connect(broker.access, RUN, node="other")
    await one.create_run(SPEC)
    figures: dict[str, Figure] = {"server": broker.version}
    for name, (size, count) in SIZES.items():
        say(f"{count} messages of {name}")
        rates = [await throughput(one, other, size, count) for _ in range(3)]
        figures[f"messages_per_s_{name}"] = median(rates)
        figures[f"megabytes_per_s_{name}"] = median(rates) * size / 1e6
    say(f"{COMMITS} commits of {GROUPS} groups")
    times = await commit_ms(one)
    figures["commit_ms_p50"], figures["commit_ms_p99"] = median(times), quantiles(times, n=100)[98]
    figures["publish_ms_p50"] = await publish_ms(one)
    figures["announce_ms_p50"] = await announce_ms(one, other)
    await one.close()
    await other.close()
    return figures


def main() -> None:
    """Measure and report."""
    with TemporaryDirectory() as directory:
        broker = start_broker(Path(directory) / "broker")
        try:
            figures = asyncio.run(measure(broker))
        finally:
            broker.stop()
    commit, rate = figures["commit_ms_p50"], figures["messages_per_s_2kb"]
    assert isinstance(commit, float)
    assert isinstance(rate, float)
    # A swarm of 100 samplers makes some 20 groups a second, each of which is three messages.
    report(
        figures, [Goal("messages_per_s_2kb", rate, at_least=600), Goal("commit_ms_p50", commit, at_most=50)]
    )


if __name__ == "__main__":
    main()
