"""The first connection: it succeeds or ends in one clear line, and later ones are spread out in time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from nats.aio.client import Client, Server

from node.broker_access import BrokerAccess
from node.nats_client import BACKOFF_CAP_S, jittered_backoff, open_client
from protocol.errors import OperatorError
from tests.build import an_identity
from tests.node.sites import Site, fake_server


async def test_no_broker_is_one_clear_line_that_names_the_url(unused_tcp_port: int):
    access = BrokerAccess(f"nats://user:secret@127.0.0.1:{unused_tcp_port}")
    with pytest.raises(OperatorError) as raised:
        await open_client(access, "node-1", on_lost=_nothing, on_back=_nothing, timeout_s=0.3)
    assert f"no broker at nats://127.0.0.1:{unused_tcp_port} (" in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_a_server_that_says_nothing_is_given_up_in_time():
    async with fake_server(greeting=b"") as (url, _):
        with pytest.raises(OperatorError, match=url):
            async with asyncio.timeout(5):
                await open_client(BrokerAccess(url), "n", on_lost=_nothing, on_back=_nothing, timeout_s=0.3)


@pytest.mark.parametrize("url", ["", "localhost:4222", "http://x:1", "nats://", "redis://x"])
def test_a_url_of_another_kind_is_refused(url: str):
    with pytest.raises(OperatorError, match="not a broker URL"):
        BrokerAccess(url)


def test_files_that_do_not_exist_are_named(tmp_path: Path):
    with pytest.raises(OperatorError, match=r"missing\.creds: no such file"):
        BrokerAccess("nats://x:1", credentials=tmp_path / "missing.creds")


def test_pauses_are_jittered_bounded_and_only_for_hosts_that_were_named():
    pool = [
        Server(uri=Client._parse_server_uri(f"nats://{host}:4222"), reconnects=9)
        for host in ("gossip", "own")
    ]
    choose = jittered_backoff(frozenset({"own:4222"}))
    choices = [choose(pool, {}) for _ in range(200)]
    assert {server.uri.hostname for server, _ in choices} == {"own"}
    pauses = [pause for _, pause in choices]
    assert max(pauses) <= BACKOFF_CAP_S
    assert min(pauses) < BACKOFF_CAP_S / 4 < BACKOFF_CAP_S / 2 < max(pauses)


async def test_an_nkey_opens_a_broker_that_knows_it_and_no_other(tmp_path: Path):
    known, stranger = an_identity("node-1"), an_identity("node-2")
    accounts = {"authorization": {"users": [{"nkey": known.public_key}]}}
    site = Site(tmp_path / "broker", extra=accounts)
    try:
        await site.bus(access=BrokerAccess(site.broker.url, nkey_seed=known.seed.decode()))
        with pytest.raises(OperatorError, match="refused the login"):
            await site.bus(access=BrokerAccess(site.broker.url, nkey_seed=stranger.seed.decode()))
    finally:
        await site.close()


async def _nothing() -> None:
    """A callback that does nothing."""
