"""Ways in: TLS, WebSockets through a proxy that demands a token, and a household's leaf node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from node.broker import start_broker
from node.broker_access import BrokerAccess
from node.broker_config import BrokerOptions, Doors
from node.cli.broker_command import _household
from node.nats_bus import NatsBus
from protocol.errors import BusError, OperatorError
from protocol.subjects import Bucket, Queue
from tests.contract.brokers import eventually
from tests.isolation.ground import Guarded, free_port
from tests.isolation.proxy import Certificates, Proxy

ANY = ("127.0.0.1", 0)


@asynccontextmanager
async def guarded_with(directory: Path, doors: Doors) -> AsyncIterator[Guarded]:
    guarded = await Guarded(directory, doors).open()
    try:
        yield guarded
    finally:
        await guarded.close()


async def works(sampler: NatsBus, guarded: Guarded, number: int = 0) -> None:
    """Takes a task, gives a rollout, is present."""
    await guarded.owner.publish(Queue.TASK, b"task", f"t{number}")
    consumer = await sampler.consume(Queue.TASK, 1)
    async with asyncio.timeout(10):
        delivery = await consumer.next()
    await sampler.publish(Queue.ROLLOUT, delivery.data, f"r{number}")
    await delivery.ack()
    await sampler.put(Bucket.NODE, "node.bob", b"here")
    await consumer.close()
    assert (await guarded.owner.depth(Queue.TASK)).total == 0
    assert (await guarded.owner.depth(Queue.ROLLOUT)).total == number + 1


# --- WebSockets through a proxy ------------------------------------------------------------------

pytest.importorskip("aiohttp")
websockets = pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")


@asynccontextmanager
async def proxied(directory: Path) -> AsyncIterator[tuple[Guarded, Proxy, BrokerAccess]]:
    """A broker behind a proxy, and how invited bob enters; his bearer token lies in a file."""
    certificates = Certificates(directory)
    async with guarded_with(directory, Doors(websocket=ANY)) as guarded:
        proxy = Proxy(urlsplit(guarded.ports["websocket"][0]).port or 0, "first-token")
        (directory / "bearer").write_text("first-token\n")
        async with proxy.open(certificates):
            access = await guarded.access("sampler", node="bob")
            through = replace(access, url=proxy.url, ca=certificates.ca, bearer_file=directory / "bearer")
            yield guarded, proxy, through


@websockets
async def test_a_node_works_through_a_proxy_that_demands_a_token(tmp_path: Path):
    async with proxied(tmp_path) as (guarded, proxy, access):
        await works(await guarded.enter(access, "bob"), guarded)
        assert (proxy.passed, proxy.refused) == (1, 0)


@websockets
async def test_a_rotated_token_is_taken_from_its_file_at_the_next_connection(tmp_path: Path):
    async with proxied(tmp_path) as (guarded, proxy, access):
        bus = await guarded.enter(access, "bob")
        await works(bus, guarded)
        proxy.token = "second-token"
        proxy.cut()

        async def turned_away() -> bool:
            return proxy.refused > 0

        await eventually(turned_away)
        assert not bus._link.connected
        (tmp_path / "bearer").write_text("second-token\n")
        async with asyncio.timeout(10):
            await bus._link.until_connected()
        await works(bus, guarded, 1)


@websockets
async def test_a_wrong_token_is_one_line_within_seconds(tmp_path: Path):
    async with proxied(tmp_path) as (_, proxy, access):
        (tmp_path / "bearer").write_text("stolen")
        with pytest.raises(OperatorError, match="wss://localhost") as caught:
            await NatsBus.connect(access, "test", node="bob", timeout_s=2)
        assert "\n" not in str(caught.value)
        assert proxy.passed == 0


@websockets
async def test_the_proxys_token_alone_opens_nothing(tmp_path: Path):
    async with proxied(tmp_path) as (guarded, _, access):
        with pytest.raises(OperatorError, match="refused the login"):
            await guarded.enter(replace(access, credentials=None), "bob")


# --- TLS -----------------------------------------------------------------------------------------


async def test_tls_lets_in_whoever_trusts_its_authority(tmp_path: Path):
    certificates = Certificates(tmp_path)
    guarded = Guarded(tmp_path, Doors(tls=(certificates.chain, certificates.key)))
    try:
        url = guarded.broker.url.replace("nats://", "tls://")
        owner = replace(guarded.broker.access, url=url, ca=certificates.ca)
        guarded.owner = await guarded.enter(owner, "owner")
        await guarded.owner.create_run(guarded.spec)
        access = replace(await guarded.access("sampler", node="bob"), url=url, ca=certificates.ca)
        await works(await guarded.enter(access, "bob"), guarded)
        with pytest.raises(OperatorError, match="certificate"):
            await guarded.enter(replace(access, ca=None), "bob")
    finally:
        await guarded.close()


# --- households ----------------------------------------------------------------------------------


async def test_a_household_works_through_one_broker_of_its_own(tmp_path: Path):
    leaf_port = free_port()
    async with guarded_with(tmp_path, Doors(leaf=("127.0.0.1", leaf_port))) as guarded:
        login, claim = guarded.accounts.invite("test", ["sampler"], ["bob", "bob-2"], None)
        await guarded.tell([claim])
        invitation = (await guarded.invited("sampler", node="other")).model_copy(
            update={
                "url": f"nats://127.0.0.1:{leaf_port}",
                "nodes": ("bob", "bob-2"),
                "jwt": login.jwt,
                "seed": login.seed,
            }
        )
        place = tmp_path / "household"
        place.mkdir()
        broker = start_broker(place, options=_household(invitation, place))
        try:
            access = BrokerAccess(broker.url, token=broker.token, core="CORE")
            first, second = [await guarded.enter(access, node) for node in ("bob", "bob-2")]

            async def reached() -> bool:
                try:
                    return await first.exists()
                except BusError:
                    return False

            await eventually(reached)
            await works(first, guarded)
            await works(second, guarded, 1)
            feed = second.announcements()
            await guarded.owner.put(Bucket.POLICY, "head.learner-1", b"head")
            async with asyncio.timeout(10):
                assert (await anext(feed)).value == b"head"
            before = await guarded.state()
            await first._link.send("$KV.grpo_test_node.node.eve", b"evil")
            await first._link.send("grpo.v1.test.rollout.eve", b"evil")
            await first._link._client.flush()
            assert await guarded.state() == before
        finally:
            broker.stop()


def test_a_websocket_on_loopback_stays_plain_and_any_other_gets_the_certificate(tmp_path: Path):
    certificates = Certificates(tmp_path)
    tls = (certificates.chain, certificates.key)
    assert Doors(websocket=("127.0.0.1", 1), tls=tls).settings()["websocket"]["no_tls"]
    assert "tls" in Doors(websocket=("0.0.0.0", 1), tls=tls).settings()["websocket"]
    with pytest.raises(OperatorError, match="--tls takes"):
        BrokerOptions(doors=Doors(tls=(tmp_path / "none", certificates.key)))
