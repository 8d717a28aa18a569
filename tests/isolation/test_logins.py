"""Logins of invited nodes: they run out, are revoked, renewed and bounded, whatever is restarted."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import nats
import nats.errors
import pytest

from node.broker_accounts import CONNECTIONS_PER_NODE, SUBSCRIPTIONS_PER_NODE
from node.invitation import Invitation
from node.joining import invited, node_access
from node.nats_bus import NatsBus
from node.settings import NodeSettings, Places
from protocol.errors import OperatorError
from protocol.subjects import Queue
from tests.contract.brokers import eventually
from tests.isolation.ground import Guarded, SeenAccess

SECONDS = 3.0
"""What a person calls at once, on a machine that is busy."""


async def until_lost(bus: NatsBus, within_s: float = SECONDS) -> float:
    """Seconds until the node has lost its connection."""
    began = time.monotonic()

    async def lost() -> bool:
        return not bus._link.connected

    await eventually(lost, within_s)
    return time.monotonic() - began


REFUSED = r"refused the login.*replaced by whoever gave it"


async def refused(access: SeenAccess, node: str) -> None:
    with pytest.raises(OperatorError, match=REFUSED):
        await NatsBus.connect(access, "test", node=node)


async def test_a_revoked_node_is_cut_off_at_once_and_its_peers_work_on(guarded: Guarded):
    bob_access, ann_access = [await guarded.access("sampler", node=node) for node in ("bob", "ann")]
    bob, ann = await guarded.enter(bob_access, "bob"), await guarded.enter(ann_access, "ann")
    waiting = await ann.consume(Queue.TASK, 1)
    await guarded.tell(guarded.accounts.revoke("bob"))
    await until_lost(bob)
    await refused(bob_access, "bob")
    await guarded.owner.publish(Queue.TASK, b"task", "t1")
    async with asyncio.timeout(SECONDS):  # ann's request from before is still good
        assert (await waiting.next()).data == b"task"
    assert ann._link._client.stats["reconnects"] == 0


async def test_a_revocation_outlives_the_broker_and_so_do_the_others_logins(guarded: Guarded):
    bob, ann = [await guarded.access("sampler", node=node) for node in ("bob", "ann")]
    guarded.accounts.revoke("bob")  # nobody tells the server: it is about to be killed
    process = guarded.broker.process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    url = guarded.broker.url
    assert guarded.start().url == url
    await refused(bob, "bob")
    bus = await guarded.enter(ann, "ann")
    assert await bus.exists()


async def test_a_login_that_runs_out_ends_the_connection_and_a_renewed_one_brings_it_back(guarded: Guarded):
    access = await guarded.access("sampler", node="bob", expires_s=2)
    bus = await guarded.enter(access, "bob")
    await until_lost(bus, 2 + SECONDS)
    # The same names again: another login for the same account, put where the running node looks.
    await guarded.access("sampler", node="bob", expires_s=3600)

    async def back() -> bool:
        return bus._link.connected

    await eventually(back)
    await bus.publish(Queue.ROLLOUT, b"work", "m1")


async def test_an_expired_login_is_refused_after_a_restart_too(guarded: Guarded):
    access = await guarded.access("sampler", node="bob", expires_s=1)
    bus = await guarded.enter(access, "bob")
    await until_lost(bus, 1 + SECONDS)
    guarded.broker.stop()
    guarded.start()

    async def out() -> bool:
        try:
            await (await NatsBus.connect(access, "test", node="bob", timeout_s=1)).close()
        except OperatorError as exc:
            return re.search(REFUSED, str(exc)) is not None
        return False

    # Claims count whole seconds: within the last one a server lets in, and puts out at once.
    await eventually(out)


async def test_a_name_that_was_revoked_can_be_given_anew_and_the_old_login_stays_out(guarded: Guarded):
    old = await guarded.invited("sampler", node="bob")
    await guarded.tell(guarded.accounts.revoke("bob"))
    new = await guarded.access("sampler", node="bob")
    assert await (await guarded.enter(new, "bob")).exists()
    credentials = old.save(guarded.directory / "old")
    with pytest.raises(OperatorError, match="refused the login"):
        await NatsBus.connect(old.access(credentials), "test", node="bob")


async def test_nobody_is_given_anothers_name(guarded: Guarded):
    await guarded.invited("sampler", node="bob")
    with pytest.raises(OperatorError, match="bob was invited to test as SAMPLERS/bob"):
        guarded.accounts.invite("test", ["verifier"], ["bob"], None)
    with pytest.raises(OperatorError, match="nobody named eve"):
        guarded.accounts.revoke("eve")


async def test_connections_and_subscriptions_of_a_guest_are_bounded(guarded: Guarded):
    access = await guarded.access("sampler", node="bob")
    errors: list[str] = []

    async def note(exc: Exception) -> None:
        errors.append(str(exc))

    clients = [
        await nats.connect(access.url, user_credentials=str(access.credentials), error_cb=note)
        for _ in range(CONNECTIONS_PER_NODE)
    ]
    try:
        with pytest.raises((nats.errors.Error, TimeoutError)):
            await asyncio.wait_for(
                nats.connect(
                    access.url,
                    user_credentials=str(access.credentials),
                    error_cb=note,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0.05,
                ),
                SECONDS,
            )
        assert any("maximum account active connections" in text for text in errors)
        with suppress(nats.errors.ConnectionClosedError):
            for number in range(SUBSCRIPTIONS_PER_NODE + 5):
                await clients[0].subscribe(f"own.{number}")

        async def told() -> bool:
            return "maximum subscriptions" in str(clients[0].last_error)

        await eventually(told)
    finally:
        for client in clients:
            await client.close()
    assert await guarded.owner.exists()


# --- the word ------------------------------------------------------------------------------------


async def test_an_invitation_is_one_word_that_says_everything_and_shows_no_secret(guarded: Guarded):
    invitation = await guarded.invited("sampler", "verifier", node="bob")
    word = invitation.word()
    assert word.split() == [word]
    assert len(word) < 2000
    assert Invitation.parse(word) == invitation
    assert invitation.seed is not None
    assert invitation.jwt is not None
    assert invitation.seed not in repr(invitation)
    assert invitation.jwt not in repr(invitation)


@pytest.mark.parametrize(
    "word", ["", "grpo1:", "grpo1:AAAA", "grpo2:AAAA", "https://x", "grpo1:" + "A" * 20_000]
)
def test_what_is_no_invitation_is_told_in_one_line(word: str):
    with pytest.raises(OperatorError, match="--join: ") as caught:
        Invitation.parse(word)
    assert "\n" not in str(caught.value)


async def test_a_damaged_or_swollen_word_is_refused(guarded: Guarded):
    word = (await guarded.invited("sampler", node="bob")).word()
    for at in range(8, len(word), 97):
        damaged = word[:at] + ("A" if word[at] != "A" else "B") + word[at + 1 :]
        with pytest.raises(OperatorError):
            Invitation.parse(damaged)
    swollen = Invitation.model_construct(
        url="nats://x:1" + "x" * 10**7, run="test", roles=("sampler",), nodes=("bob",)
    )
    with pytest.raises(OperatorError):
        Invitation.parse(swollen.word())


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../etc"},
        {"nodes": ("../bob",)},
        {"url": "nats://x:1\nPING"},
        {"jwt": "a\n-----BEGIN USER NKEY SEED-----"},
        {"nodes": ()},
    ],
)
async def test_an_invitation_cannot_name_a_path_or_a_second_line(guarded: Guarded, change: dict[str, object]):
    good = await guarded.invited("sampler", node="bob")
    evil = Invitation.model_construct(**(good.model_dump() | change))
    with pytest.raises(OperatorError, match="damaged"):
        Invitation.parse(evil.word())


async def test_a_login_is_kept_for_its_owner_only(guarded: Guarded, tmp_path: Path):
    invitation = await guarded.invited("sampler", node="bob")
    settings = NodeSettings(
        "test", ("sampler",), invitation.url, name="bob", places=Places(tmp_path), invitation=invitation
    )
    access = node_access(settings)
    assert access.credentials is not None
    assert access.credentials.stat().st_mode & 0o777 == 0o600
    assert access.credentials.is_relative_to(tmp_path / "nodes" / "test" / "bob")
    for path in (guarded.directory / "broker" / "accounts").glob("*.json"):
        assert path.stat().st_mode & 0o777 == 0o600


async def test_an_invitation_says_what_may_be_played(guarded: Guarded):
    invitation = await guarded.invited("sampler", node="bob")
    assert invited(invitation, (), None, None) == (("sampler",), "bob")
    for arguments, says in (
        ((("learner",), None, None), "--role learner"),
        (((), "other", None), "--run other"),
        (((), None, "eve"), "--name eve"),
    ):
        with pytest.raises(OperatorError, match=says):
            invited(invitation, *arguments)
