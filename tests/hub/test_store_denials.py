"""What a person is told about a bucket, a token and a network, in one line, and what is not tried again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from node.hub_calls import HubCalls
from node.hub_store import HubStore
from protocol.errors import StoreDenied, StoreUnavailable
from tests.build import an_entry
from tests.contract.stores import HUB_TIMES, HubWorld

PATH = "test/updates/learner-1/1-abc"

CALLS: dict[str, Callable[[HubStore], Awaitable[object]]] = {
    "publish": lambda store: store.publish(*an_entry("test/other")),
    "fetch": lambda store: store.fetch(PATH),
    "manifest": lambda store: store.manifest(PATH),
    "list": lambda store: store.list("test"),
    "delete": lambda store: store.delete(PATH),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[[HubStore], Awaitable[object]]:
    return CALLS[request.param]


async def denied(world: HubWorld, store: HubStore, call: Callable[[HubStore], Awaitable[object]]) -> str:
    """The one line that a call ends with, after asking the Hub a few times at most."""
    world.hub.requests.clear()
    with pytest.raises(StoreDenied) as refused:
        await call(store)
    assert len(world.hub.requests) <= 6, world.hub.requests
    assert "\n" not in str(refused.value)
    return str(refused.value)


async def test_a_missing_bucket_is_named_with_the_command_that_makes_it(world: HubWorld, call):
    world.bucket = "alice/gone"
    told = await denied(world, world.node(), call)
    assert "no bucket alice/gone that alice may see" in told
    assert "--create-bucket" in told


async def test_somebody_elses_private_bucket_is_not_there(world: HubWorld, call):
    await world.node().publish(*an_entry())
    told = await denied(world, world.node(calls=world.calls(token="hf_bob")), call)
    assert f"no bucket {world.bucket} that bob may see" in told


async def test_a_token_that_expires_is_told_apart_and_a_new_one_is_taken(world: HubWorld, call):
    world.hub.tokens["hf_brief"] = "alice"
    store = world.node(calls=world.calls(token="hf_brief"))
    await store.publish(*an_entry())
    del world.hub.tokens["hf_brief"]
    told = await denied(world, store, call)
    assert "the Hub refuses this token" in told
    assert "hf auth login" in told
    world.hub.tokens["hf_brief"] = "alice"
    await call(store)


async def test_a_token_is_looked_up_at_every_call(world: HubWorld, call, monkeypatch: pytest.MonkeyPatch):
    await world.node().publish(*an_entry())
    calls = HubCalls(world.bucket, endpoint=world.hub.url, times=HUB_TIMES)
    assert "this machine has no token" in await denied(world, world.node(calls=calls), call)
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    await call(world.node(calls=calls))


@pytest.mark.parametrize("name", ["publish", "delete"])
async def test_a_token_without_the_right_to_write_reads(
    world: HubWorld, name: str, monkeypatch: pytest.MonkeyPatch
):
    await world.node().publish(*an_entry())
    monkeypatch.setitem(world.hub.tokens, "hf_reader", "alice")
    monkeypatch.setattr(world.hub, "read_only", {"hf_reader"})
    reader = world.node(calls=world.calls(token="hf_reader"))
    await reader.fetch(PATH)
    assert "right to write" in await denied(world, reader, CALLS[name])


async def test_a_hub_that_is_not_there_is_a_fault_that_may_pass(world: HubWorld):
    calls = HubCalls(world.bucket, endpoint="http://127.0.0.1:9", token="hf_alice", times=HUB_TIMES)
    with pytest.raises(StoreUnavailable, match=r"the Hub at http://127\.0\.0\.1:9") as failed:
        await world.node(calls=calls, timeout_s=0.5).fetch(PATH)
    assert "\n" not in str(failed.value)
