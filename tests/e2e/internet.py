"""A ring across the open internet, on this machine: everybody has a home, a login and tokens of their own.

ada   learner    nats://  ──┐
eve   verifier   nats://  ──┤ broker with accounts          bucket on the stand-in Hub, reached
bob   sampler    nats://  ──┤ (grpo-node broker, invite)    by the stock huggingface_hub and hf_xet
ann   sampler    wss://   ──┘ through a TLS proxy that
                              demands a bearer token
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from node.broker_access import BrokerAccess
from node.nats_bus import NatsBus
from node.progress import Progress
from protocol.codec import decode_as
from protocol.messages import Event
from tests.e2e.machine import Machine
from tests.hub.server import HubServer
from tests.isolation.ground import free_port
from tests.isolation.proxy import Certificates, Proxy

RUN = "ring"
BUCKET = "alice/ring"
UPDATES = 12
RUN_FILE = f"""
name = "{RUN}"
rewards = [{{ name = "exact" }}]
[model]
ref = "builtin:tiny-0"
[lora]
rank = 4
alpha = 8
[tasks]
source = "builtin:sort-digits"
template = "{{prompt}}"
held_out = 512
[sampling]
max_new_tokens = 5
ack_wait_s = 6
[learner]
updates = {UPDATES}
groups_per_update = 128
publish_every = 2
learning_rate = 3e-3
beta2 = 0.99
state_every = {UPDATES}
export_every = 0
[eval]
every = 0
problems = 128
completions_per_problem = 4
[store]
url = "hf://buckets/{BUCKET}/runs"
"""
"""Steps of two seconds, as a real model's are long beside a call of the Hub's; all batches but the last few
are updates."""

WRITER, READER = "hf_alice", "hf_reader"
"""Tokens: the owner and the learner write, samplers and verifiers only read."""

BEARER = "hub-token"
WITHIN_S = 400.0
"""Joining is quick; importing torch in several processes on a busy machine is not."""


class Ring:
    """The run as its owner sees it, and the friends who take part."""

    def __init__(self, directory: Path, hub: HubServer, proxy: Proxy) -> None:
        hub.tokens[READER] = "alice"
        hub.read_only.add(READER)
        self.hub = hub
        self.proxy = proxy
        self.progress = Progress(UPDATES)
        self.friends: dict[str, subprocess.Popen[str]] = {}
        self._directory = directory
        self._news = asyncio.Condition()
        self._machines: dict[str, Machine] = {}
        self._owner = self._machine("owner", WRITER)

    async def run(self, *words: str) -> str:
        """A command of the owner's."""
        return await asyncio.to_thread(self._owner.run, *words)

    async def open(self, websocket: int) -> BrokerAccess:
        """Start a broker with accounts, make bucket and run; how the owner enters."""
        doors = ("--listen", "127.0.0.1:0", "--websocket", f"127.0.0.1:{websocket}")
        broker = self._owner.start("broker", "--dir", "broker", *doors)
        assert broker.stdout is not None
        lines = [await asyncio.to_thread(broker.stdout.readline) for _ in range(3)]
        found = re.search(r"GRPO_BROKER=(\S+) GRPO_CREDENTIALS=(\S+)", lines[1])
        assert found, lines
        self._owner.environ |= {"GRPO_BROKER": found[1], "GRPO_CREDENTIALS": found[2]}
        (self._owner.directory / "run.toml").write_text(RUN_FILE)
        assert "created" in await self.run("create", "run.toml", "--create-bucket")
        return BrokerAccess(found[1], credentials=self._owner.directory / found[2])

    async def invite(self, role: str, name: str, *options: str, **environ: str) -> None:
        """A friend joins, with nothing but the printed line and a token for the Hub."""
        line = await self.run(
            "invite", "--role", role, "--run", RUN, "--name", name, "--dir", "broker", *options
        )
        program, *arguments = line.split()
        assert program == "grpo-node"
        machine = self._machine(name, WRITER if role == "learner" else READER, **environ)
        self.friends[name] = machine.start(*arguments, "--threads", "1")

    async def until(self, holds: Callable[[Progress], bool]) -> None:
        """Wait until the run has come so far."""
        try:
            async with asyncio.timeout(WITHIN_S), self._news:
                await self._news.wait_for(lambda: holds(self.progress))
        except TimeoutError:
            raise AssertionError(f"{self.progress}\n{self.logs()}") from None

    async def watch(self, bus: NatsBus) -> None:
        """Read telemetry into ``progress`` for ever."""
        async for frame in bus.events(replay=True):
            async with self._news:
                self.progress.take(decode_as(frame, Event))
                self._news.notify_all()

    async def finished(self, *leaving: str) -> None:
        """Wait until the run is over and these have left in order."""
        await self.until(lambda progress: progress.finished)
        codes = [await asyncio.to_thread(self.friends[name].wait, WITHIN_S) for name in leaving]
        assert codes == [0] * len(leaving), self.logs()

    def logs(self) -> str:
        """The end of everybody's log."""
        return "\n".join(f"--- {name}\n{machine.logs()}" for name, machine in self._machines.items())

    def close(self) -> None:
        """End what still runs, the broker last."""
        for machine in reversed(self._machines.values()):
            machine.close()

    def _machine(self, name: str, token: str, **environ: str) -> Machine:
        directory = self._directory / name
        hub = {"HF_ENDPOINT": self.hub.url, "HF_TOKEN": token, "HF_HOME": str(directory / "hf")}
        made = Machine(directory, **hub, **environ)
        for ours in ("HF_XET_CACHE", "HF_XET_CLIENT_READ_TIMEOUT", "HF_XET_CLIENT_RETRY_BASE_DELAY"):
            made.environ.pop(ours, None)  # of this test process; a node has its own
        self._machines[name] = made
        return made


@asynccontextmanager
async def open_ring(directory: Path, hub: HubServer) -> AsyncIterator[Ring]:
    """Broker, bucket, run and friends; all of them end with the body, however it ends."""
    websocket, certificates = free_port(), Certificates(directory)
    (directory / "bearer").write_text(BEARER)
    through = {"GRPO_BEARER_FILE": str(directory / "bearer"), "GRPO_CA": str(certificates.ca)}
    async with Proxy(websocket, BEARER).open(certificates) as proxy:
        ring = Ring(directory, hub, proxy)
        try:
            bus = await NatsBus.connect(await ring.open(websocket), RUN, node="watcher")
            watching = asyncio.create_task(ring.watch(bus))
            try:
                await ring.invite("learner", "ada")
                await ring.invite("verifier", "eve")
                await ring.invite("sampler", "bob")
                await ring.invite("sampler", "ann", "--url", proxy.url, "--expires", "7d", **through)
                yield ring
            finally:
                watching.cancel()
                await bus.close()
        finally:
            ring.close()
