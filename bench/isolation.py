"""Do honest peers keep their throughput while a hostile sampler floods the broker?

A real nats-server with accounts on loopback. An honest sampler offers groups at a steady pace, as a swarm of
a hundred samplers would together, and a verifier takes them and throws away what is not a group. A process
of its own, with a sampler's login, does what it can to be in the way.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

import nats

from bench.harness import Figure, Goal, report, say
from node.broker import Broker, start_broker
from node.broker_accounts import Accounts
from node.broker_config import BrokerOptions
from node.invitation import Invitation
from node.nats_bus import NatsBus
from node.nats_claims import tell_claims
from node.rights import CORE
from protocol.runspec import RunSpec
from protocol.subjects import Names, Queue

RUN = "bench"
PACE_PER_S, SECONDS = 50, 8
"""Groups a second: twice what a hundred samplers of a hundred tokens a second make."""
GROUP_BYTES = 32 << 10
FLOODS = ("rollouts", "forbidden", "requests")
SPEC = RunSpec.model_validate(
    {
        "name": RUN,
        "model": {"ref": "builtin:tiny"},
        "tasks": {"source": "builtin:sort-digits"},
        "rewards": [{"name": "exact"}],
        "store": {"url": "file:///nowhere"},
    }
)


async def flood(kind: str, url: str, credentials: str) -> None:
    """Be in the way for ever."""
    names = Names(RUN)
    subject = {
        "rollouts": names.subject(Queue.ROLLOUT, "mallory"),
        "forbidden": names.subject(Queue.VERIFIED, "mallory"),
        "requests": f"{CORE}.API.CONSUMER.INFO.{names.stream(Queue.TASK)}.{names.consumer(Queue.TASK)}",
    }[kind]
    data = b"" if kind == "requests" else os.urandom(1024)
    client = await nats.connect(url, user_credentials=credentials)
    inbox = client.new_inbox()
    print("flooding", flush=True)
    while True:
        for _ in range(64):
            await client.publish(subject, data, inbox)
        await client.flush()


async def offered(sampler: NatsBus, verifier: NatsBus, label: str) -> dict[str, Figure]:
    """Groups a second that arrived, and how long the slowest of a hundred took."""
    sent: dict[bytes, float] = {}
    times: list[float] = []
    arrived: list[float] = []
    consumer = await verifier.consume(Queue.ROLLOUT, 16)

    async def take() -> None:
        while len(times) < PACE_PER_S * SECONDS:
            delivery = await consumer.next()
            begun = sent.pop(delivery.data[:32], None)
            if begun is None:
                await delivery.reject()
                continue
            arrived.append(time.perf_counter())
            times.append((arrived[-1] - begun) * 1e3)
            await delivery.ack()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        group.create_task(take())
        for number in range(PACE_PER_S * SECONDS):
            await asyncio.sleep(max(0.0, start + number / PACE_PER_S - time.perf_counter()))
            data = os.urandom(GROUP_BYTES)
            sent[data[:32]] = time.perf_counter()
            group.create_task(sampler.publish(Queue.ROLLOUT, data, f"{label}-{number}"))
    await consumer.close()
    rate = (len(times) - 1) / (arrived[-1] - arrived[0])
    return {f"groups_per_s_{label}": rate, f"latency_ms_p99_{label}": quantiles(times, n=100)[98]}


async def measure(broker: Broker, directory: Path) -> dict[str, Figure]:
    """All figures."""
    accounts = Accounts.open(directory / "broker")
    owner = await NatsBus.connect(broker.access, RUN, node="owner")
    await owner.create_run(SPEC)

    async def login(role: str, node: str) -> tuple[Invitation, Path]:
        made, claim = accounts.invite(RUN, [role], [node], None)
        await tell_claims(broker.url, accounts.system_login().text(), [claim])
        invitation = Invitation(
            url=broker.url, run=RUN, roles=(role,), nodes=(node,), core=CORE, jwt=made.jwt, seed=made.seed
        )
        kept = invitation.save(directory / node)
        assert kept is not None
        return invitation, kept

    async def join(role: str, node: str) -> NatsBus:
        invitation, kept = await login(role, node)
        return await NatsBus.connect(invitation.access(kept), RUN, node=node)

    sampler, verifier = await join("sampler", "bob"), await join("verifier", "eve")
    _, mallory = await login("sampler", "mallory")
    say("nobody floods")
    figures = await offered(sampler, verifier, "alone")
    for kind in FLOODS:
        say(f"mallory floods with {kind}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.isolation", "--flood", kind, broker.url, str(mallory),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        await process.stdout.readline()
        try:
            figures |= await offered(sampler, verifier, kind)
        finally:
            process.kill()
            await process.wait()
    for bus in (sampler, verifier, owner):
        await bus.close()
    return {"server": broker.version, **figures}


def main() -> None:
    """Measure and report."""
    if sys.argv[1:2] == ["--flood"]:
        asyncio.run(flood(*sys.argv[2:5]))
        return
    with TemporaryDirectory() as directory:
        broker = start_broker(Path(directory) / "broker", options=BrokerOptions(accounts=True))
        try:
            figures = asyncio.run(measure(broker, Path(directory)))
        finally:
            broker.stop()
    alone = float(figures["groups_per_s_alone"] or 0)
    kept = [float(figures[f"groups_per_s_{kind}"] or 0) / alone for kind in FLOODS]
    report({**figures, "kept_least": min(kept)}, [Goal("throughput_kept", min(kept), at_least=0.9)])


if __name__ == "__main__":
    main()
