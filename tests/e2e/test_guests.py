"""Friends join by one line each: the ring turns in accounts, one sampler comes through a proxy."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_nodes import RUN_FILE, Machine
from tests.isolation.ground import free_port
from tests.isolation.proxy import Certificates, Proxy

pytest.importorskip("aiohttp")

WITHIN_S = 300.0
"""Joining is quick; importing torch in several processes on a busy machine is not."""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def status_until(owner: Machine, holds: Any) -> Any:
    deadline = time.monotonic() + WITHIN_S
    status = None
    while time.monotonic() < deadline:
        status = json.loads(await asyncio.to_thread(owner.run, "status", "sorting", "--json"))
        if holds(status):
            return status
    raise AssertionError(f"{status}\n{owner.logs()}")


def open_broker(owner: Machine, port: int) -> None:
    """A broker with accounts; the environment says how its owner enters."""
    broker = owner.start(
        "broker", "--dir", "broker", "--listen", "127.0.0.1:0", "--websocket", f"127.0.0.1:{port}"
    )
    assert broker.stdout is not None
    lines = [broker.stdout.readline() for _ in range(3)]
    found = re.search(r"GRPO_BROKER=(\S+) GRPO_CREDENTIALS=(\S+)", lines[1])
    assert found, lines
    owner.environ |= {"GRPO_BROKER": found[1], "GRPO_CREDENTIALS": found[2]}
    (owner.directory / "run.toml").write_text(RUN_FILE)
    assert "created" in owner.run("create", "run.toml")


def invite(owner: Machine, role: str, name: str, *options: str) -> list[str]:
    """The arguments that the printed line has."""
    words = ["--role", role, "--run", "sorting", "--name", name, "--dir", "broker", *options]
    line = owner.run("invite", *words)
    program, *arguments = line.split()
    assert program == "grpo-node"
    return arguments


def join(owner: Machine, arguments: list[str], **environ: str) -> Any:
    """A friend's process: it has nothing but the line (and here the directory of the store)."""
    ours = owner.environ
    hidden = ("GRPO_BROKER", "GRPO_CREDENTIALS")
    owner.environ = {key: value for key, value in ours.items() if key not in hidden} | environ
    try:
        store = str(owner.directory / "store")
        return owner.start(*arguments, "--threads", "1", "--allow-path", store)
    finally:
        owner.environ = ours


@pytest.mark.timeout(900)
async def test_a_ring_of_friends_one_of_them_behind_a_proxy(owner: Machine, tmp_path: Path):
    port = free_port()
    certificates = Certificates(tmp_path)
    await asyncio.to_thread(open_broker, owner, port)
    (tmp_path / "bearer").write_text("hub-token")
    async with Proxy(port, "hub-token").open(certificates) as proxy:
        arguments = await asyncio.to_thread(invite, owner, "learner", "ada", "--role", "verifier")
        join(owner, arguments)
        arguments = await asyncio.to_thread(invite, owner, "sampler", "bob")
        join(owner, arguments)
        arguments = await asyncio.to_thread(
            invite, owner, "sampler", "ann", "--url", proxy.url, "--expires", "7d"
        )
        through = {"GRPO_BEARER_FILE": str(tmp_path / "bearer"), "GRPO_CA": str(certificates.ca)}
        ann = join(owner, arguments, **through)
        status = await status_until(
            owner,
            lambda s: s["version"] >= 3 and {p["node"] for p in s["peers"]} == {"ada", "bob", "ann"},
        )
        assert proxy.passed >= 1
        assert status["groups_dead"] == 0

        # Through the proxy alone the ring turns, too: bob is shown the door at once, and stays out.
        assert "bob is out" in await asyncio.to_thread(owner.run, "revoke", "bob", "--dir", "broker")
        await status_until(owner, lambda s: {p["node"] for p in s["peers"]} == {"ada", "ann"})
        after = await status_until(owner, lambda s: s["version"] >= status["version"] + 3)
        listed = await asyncio.to_thread(owner.run, "invitations", "--dir", "broker")
        assert re.search(r"revoked\s+sampler bob", listed)
        assert re.search(r"good\s+sampler ann", listed)

        proxy.cut()
        await status_until(owner, lambda s: s["version"] >= after["version"] + 2)
        ann.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(ann.wait, 40) == 0
    assert "broker_permission_denied" not in owner.logs()
