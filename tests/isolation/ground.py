"""A broker with accounts, its owner, invited nodes, and a hand that uses their logins for something else."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from node.broker import Broker, start_broker
from node.broker_access import BrokerAccess
from node.broker_accounts import Accounts
from node.broker_config import BrokerOptions, Doors
from node.invitation import Invitation
from node.nats_bus import NatsBus
from node.nats_claims import tell_claims
from node.rights import CORE
from protocol.runspec import RunSpec
from protocol.subjects import Names
from tests.build import a_runspec

SPEC = a_runspec(sampling={"max_new_tokens": 5, "ack_wait_s": 2.0})
ANSWER_S = 0.5
"""Nobody answers a stranger's request; a broker on this machine that did would be a hundred times faster."""


@dataclass(frozen=True, slots=True)
class SeenAccess(BrokerAccess):
    """A login that remembers to which subjects of the core its node spoke."""

    used: set[str] = field(default_factory=set)

    def local(self, subject: str) -> str:
        """What to publish to."""
        self.used.add(subject)
        return BrokerAccess.local(self, subject)


class Guarded:
    """A broker with accounts in ``directory``, with one run on it."""

    def __init__(self, directory: Path, doors: Doors | None = None, spec: RunSpec = SPEC) -> None:
        self.directory = directory
        self.spec = spec
        self.names = Names(spec.name)
        self._options = BrokerOptions(accounts=True, doors=doors or Doors())
        self._stack = AsyncExitStack()
        self.broker = self.start()
        self.accounts = Accounts.open(directory / "broker")
        self.owner: NatsBus

    def start(self) -> Broker:
        self.broker = start_broker(self.directory / "broker", options=self._options)
        return self.broker

    @property
    def ports(self) -> dict[str, list[str]]:
        """Where the server says that it listens, by kind."""
        (file,) = (self.directory / "broker").glob("*.ports")
        return dict(json.loads(file.read_text()))

    async def open(self) -> Guarded:
        self.owner = await self.enter(self.broker.access, "owner")
        await self.owner.create_run(self.spec)
        return self

    async def close(self) -> None:
        await self._stack.aclose()
        self.broker.stop()

    async def enter(self, access: BrokerAccess, node: str) -> NatsBus:
        """A node that closes when the test ends."""
        bus = await NatsBus.connect(access, self.spec.name, node=node)
        self._stack.push_async_callback(bus.close)
        return bus

    async def invited(self, *roles: str, node: str, expires_s: float | None = None) -> Invitation:
        """An invitation, as ``grpo-node invite`` gives it."""
        expires_at = None if expires_s is None else time.time() + expires_s
        login, claim = self.accounts.invite(self.spec.name, roles, [node], expires_at)
        await self.tell([claim])
        return Invitation(
            url=self.broker.url,
            run=self.spec.name,
            roles=roles,
            nodes=(node,),
            core=CORE,
            jwt=login.jwt,
            seed=login.seed,
        )

    async def tell(self, claims: Sequence[str]) -> None:
        await tell_claims(self.broker.url, self.accounts.system_login().text(), claims)

    async def access(self, *roles: str, node: str, expires_s: float | None = None) -> SeenAccess:
        """How an invited node enters."""
        invitation = await self.invited(*roles, node=node, expires_s=expires_s)
        found = invitation.access(invitation.save(self.directory / node))
        return SeenAccess(found.url, credentials=found.credentials, core=found.core)

    async def bus(self, *roles: str, node: str) -> NatsBus:
        """An invited node."""
        return await self.enter(await self.access(*roles, node=node), node)

    async def hand(self, *roles: str, node: str) -> Hand:
        """A client that has a node's login and does with it what no node would."""
        access = await self.access(*roles, node=node)
        hand = Hand(
            await nats.connect(
                access.url, user_credentials=str(access.credentials), error_cb=_ignore, name=node
            ),
            access,
        )
        self._stack.push_async_callback(hand.client.close)
        return hand

    async def state(self) -> dict[str, Any]:
        """All that the broker keeps, by stream: how it is configured, what it holds, how many consumers."""
        page = await self.owner._link.read_api("STREAM.LIST")
        return {
            stream["config"]["name"]: {
                "config": stream["config"],
                **{key: stream["state"][key] for key in ("messages", "bytes", "last_seq", "consumer_count")},
            }
            for stream in page["streams"]
        }


class Hand:
    """A raw client."""

    def __init__(self, client: Client, access: BrokerAccess) -> None:
        self.client = client
        self.access = access

    async def ask(self, subject: str, data: bytes = b"", **headers: str) -> Msg | None:
        """The answer, or None if there is none but errors, whatever name for the subject is tried: an account
        without streams says of itself that it has none."""
        for each in dict.fromkeys((self.access.local(subject), subject)):
            try:
                answer = await self.client.request(
                    each, data, timeout=ANSWER_S, headers={k.replace("_", "-"): v for k, v in headers.items()}
                )
            except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
                continue
            if b'"error":' not in answer.data:
                return answer
        return None

    async def shout(self, subject: str, data: bytes = b"", reply: str = "") -> None:
        """Publish under every name for the subject, and see it leave."""
        for each in {self.access.local(subject), subject}:
            await self.client.publish(each, data, reply)
        await self.client.flush()


async def _ignore(_: Exception) -> None:
    """Refusals are the point."""


def free_port() -> int:
    """A port of which the server does not say that it has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def drained(*buses: NatsBus) -> None:
    """Everything that these nodes had sent has arrived."""
    await asyncio.gather(*(bus._link._client.flush() for bus in buses))
