"""A swarm on one machine: a broker, a run, and its peers as separate processes, watched from here."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from node.broker import Broker, start_broker
from node.broker_access import BrokerAccess
from node.children import Child, kill, last_words, send, start_child, stop_children
from node.consent import modules_of
from node.identity_file import load_or_create_identity
from node.nats_bus import NatsBus
from node.progress import Progress
from node.recover import create_or_recover
from node.settings import ENV_HOME, ENV_TOKEN, Environment, Role, child_environment, share_threads
from protocol.codec import decode_as
from protocol.errors import DecodeError, OperatorError
from protocol.messages import Event, Head
from protocol.runspec import RunSpec
from protocol.subjects import Bucket

RESTARTS_MAX = 5
"""Restarts of one peer that keeps dying before the swarm gives up."""

CHECK_S = 0.25
SHOW_S = 1.0
LAST_WORD_S = 5.0
WATCHER = "watcher"


@dataclass(frozen=True, slots=True)
class Peer:
    """One process of the swarm."""

    name: str
    roles: tuple[Role, ...]
    threads: int = 1
    options: tuple[str, ...] = ()


def peers_for(
    learners: int,
    samplers: int,
    verifiers: int,
    environment: Environment,
    threads: int | None = None,
    sampler_options: tuple[str, ...] = (),
) -> list[Peer]:
    """Peers ``learner-1``, ``sampler-1``… with the cores divided among those that compute, or with
    ``threads`` each; samplers are started with ``sampler_options``."""
    wanted: list[tuple[Role, int]] = [("learner", learners), ("sampler", samplers), ("verifier", verifiers)]
    options: dict[Role, tuple[str, ...]] = {"sampler": sampler_options}
    peers = [
        Peer(f"{role}-{i + 1}", (role,), options=options.get(role, ()))
        for role, count in wanted
        for i in range(count)
    ]
    shares = share_threads(environment, [peer.roles for peer in peers])
    return [replace(peer, threads=threads or share) for peer, share in zip(peers, shares, strict=True)]


class Swarm:
    """Peers of one run on this machine. Use ``open_swarm``."""

    def __init__(self, spec: RunSpec, broker: Broker, bus: NatsBus, home: Path, directory: Path) -> None:
        """``home`` is GRPO_HOME for the peers; logs go below ``directory``."""
        self.spec = spec
        self.bus = bus
        self.progress = Progress(spec.learner.updates)
        self.broker = broker
        self._home = home
        self._directory = directory
        self._children: dict[str, Child] = {}
        self._peers: dict[str, Peer] = {}
        self._restarts: dict[str, int] = {}
        self._news = asyncio.Condition()
        self.killed: list[str] = []

    async def start(self, peer: Peer) -> None:
        """Start a peer as a process of its own."""
        command = [sys.executable, "-m", "node", "--run", self.spec.name, "--broker", self.broker.url]
        command += ["--name", peer.name, "--threads", str(peer.threads), "--log", "info", "--wait"]
        command += peer.options
        for role in peer.roles:
            command += ["--role", role]
        for role in peer.roles:  # whoever starts a run here chose its rewards and tools
            for module in modules_of(self.spec, role):
                command += ["--allow-module", module]
        environ = child_environment({ENV_TOKEN: self.broker.token, ENV_HOME: str(self._home)})
        log = self._directory / "logs" / f"{peer.name}.log"
        self._children[peer.name] = await start_child(peer.name, command, environ, log)
        self._peers[peer.name] = peer

    @property
    def alive(self) -> list[str]:
        """Names of peers whose process runs."""
        return [name for name, child in self._children.items() if child.alive]

    def log(self, name: str) -> Path:
        """Where a peer writes."""
        return self._children[name].log

    def kill(self, name: str, *, for_good: bool = True) -> Peer:
        """SIGKILL a peer, as a power cut would; returns what it was. Unless ``for_good``, it is started
        again like any peer that dies."""
        if for_good:
            self.killed.append(name)
        kill(self._children[name])
        return self._peers[name]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a peer a signal."""
        send(self._children[name], number)

    async def watch(self) -> None:
        """Read telemetry into ``progress`` for ever."""
        async for frame in self.bus.events(replay=True):
            try:
                event = decode_as(frame, Event)
            except DecodeError as exc:
                structlog.get_logger().warning("event_unreadable", error=str(exc))
                continue
            async with self._news:
                self.progress.take(event)
                self._news.notify_all()

    async def until(self, holds: Callable[[Progress], bool]) -> None:
        """Wait until the run has come so far."""
        async with self._news:
            await self._news.wait_for(lambda: holds(self.progress))

    async def show_to(self, show: Callable[[Swarm], None]) -> None:
        """Call ``show`` about once a second, for ever."""
        while True:
            show(self)
            await asyncio.sleep(SHOW_S)

    async def head(self) -> Head | None:
        """The head of the first learner, or None before anybody committed one."""
        heads = await self.bus.list(Bucket.POLICY, "head")
        return decode_as(next(iter(heads.values())).value, Head) if heads else None

    async def finished(self) -> None:
        """Wait until a learner has ended the run and its last word was heard. Restarts what dies;
        raises OperatorError with the end of its log if something dies again and again."""
        while not await self._look_after():  # noqa: ASYNC110 processes end without telling
            await asyncio.sleep(CHECK_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.until(lambda progress: progress.finished), LAST_WORD_S)

    async def _look_after(self) -> bool:
        """Restart peers that died; True once a learner has ended in order."""
        for name, child in list(self._children.items()):
            if child.alive or name in self.killed:
                continue
            if child.process.returncode != 0:
                await self._restart(name, child)
            elif "learner" in self._peers[name].roles:
                return True
        return False

    async def stop(self, grace_s: float) -> None:
        """Stop every peer in order."""
        await stop_children(list(self._children.values()), grace_s)

    async def _restart(self, name: str, child: Child) -> None:
        self._restarts[name] = self._restarts.get(name, 0) + 1
        code = child.process.returncode
        if code == 2 or self._restarts[name] > RESTARTS_MAX:  # noqa: PLR2004 an operator's mistake
            raise OperatorError(f"{name} ended with code {code}; {child.log} ends:\n{last_words(child.log)}")
        structlog.get_logger().warning("peer_restarted", peer=name, code=code, log=str(child.log))
        await self.start(self._peers[name])


@asynccontextmanager
async def open_swarm(
    spec: RunSpec, environment: Environment, directory: Path, peers: Sequence[Peer], grace_s: float = 20.0
) -> AsyncIterator[Swarm]:
    """Broker, run and peers; all of them end with the body, however it ends.

    ``spec`` must be pinned. The broker's disk, logs and identities lie below ``directory``.
    """
    # On this thread: the broker ends with the thread that started it, should this process be killed.
    broker = start_broker(directory / "broker", binary=environment.nats_server)
    bus = await NatsBus.connect(BrokerAccess(broker.url, token=broker.token), spec.name, node=WATCHER)
    swarm = Swarm(spec, broker, bus, environment.places.home, directory)
    try:
        identity = await asyncio.to_thread(load_or_create_identity, directory / "watcher.nk", WATCHER)
        await create_or_recover(bus, spec, identity, directory / "cache")
        watching = asyncio.create_task(swarm.watch())
        try:
            for peer in peers:
                await swarm.start(peer)
            yield swarm
        finally:
            watching.cancel()
            await swarm.stop(grace_s)
    finally:
        await bus.close()
        swarm.broker.stop()
