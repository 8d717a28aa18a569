"""A hostile sampler that takes too much: its own share is spent, and nobody else's."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from node.bus_rules import HEADERS_MAX, NODE_AGE_S
from node.nats_answers import answer_json
from node.nats_blob import CHUNKS_MAX
from node.nats_chunks import CHUNK_BYTES
from protocol.errors import BackPressure, MessageTooLarge
from protocol.limits import INLINE_BYTES_MAX, NODE_BYTES_MAX, SAMPLER_MESSAGES_MAX, SAMPLER_PAYLOADS_MAX
from protocol.subjects import Queue
from tests.isolation.scene import Scene

API = "$JS.API"
LARGE = bytes(INLINE_BYTES_MAX + 1)
EVIL = b"evil"


async def test_a_flood_fills_its_own_share_of_the_queue_and_no_other(scene: Scene):
    flood = [
        scene.mallory.client.request("grpo.v1.test.rollout.mallory", EVIL, timeout=20)
        for _ in range(SAMPLER_MESSAGES_MAX + 50)
    ]
    outcomes: list[str] = []
    for answer in await asyncio.gather(*flood):
        try:
            answer_json(answer)
            outcomes.append("stored")
        except BackPressure:
            outcomes.append("refused")
    assert (outcomes.count("stored"), outcomes.count("refused")) == (SAMPLER_MESSAGES_MAX, 50)
    await scene.bob.publish(Queue.ROLLOUT, b"still welcome", "r9")


async def test_its_share_of_the_object_store_is_bounded(scene: Scene):
    hand = scene.mallory
    slot = hand.access.local("$O.grpo_test_blob_rollout.C.mallory.0")
    answers = await asyncio.gather(
        *(hand.client.request(slot, b"x", timeout=20) for _ in range(CHUNKS_MAX + 10))
    )
    assert sum(b"10077" in answer.data for answer in answers) == 10
    large = await hand.client.request(slot[:-1] + "1", bytes(CHUNK_BYTES + HEADERS_MAX + 1), timeout=5)
    with pytest.raises(MessageTooLarge):
        answer_json(large)
    await scene.bob.publish(Queue.ROLLOUT, LARGE, "r9")


async def test_a_reference_to_another_ones_payload_is_no_reference(scene: Scene):
    """bob's payload lies in one of his slots; whoever could name it could have it removed."""
    taken = await scene.verifier.consume(Queue.ROLLOUT, 8)
    async with asyncio.timeout(5):
        small, large = await taken.next(), await taken.next()
        assert (small.data, large.data) == (b"bob's work", LARGE)
        digest = hashlib.sha256(LARGE).hexdigest()
        for slot in range(SAMPLER_PAYLOADS_MAX):
            header = {"Grpo-Blob": f"{slot} {len(LARGE)} {digest}"}
            await scene.mallory.client.request("grpo.v1.test.rollout.mallory", b"", headers=header)
        for _ in range(SAMPLER_PAYLOADS_MAX):
            delivery = await taken.next()
            assert delivery.data == b""  # unreadable
            await delivery.reject()
        await large.release()
        assert (await taken.next()).data == LARGE


async def test_presence_is_small_and_passes(scene: Scene):
    own = scene.mallory.access.local("$KV.grpo_test_node.node.mallory")
    with pytest.raises(MessageTooLarge):
        answer_json(await scene.mallory.client.request(own, bytes(NODE_BYTES_MAX + HEADERS_MAX + 1)))
    config = (await scene.guarded.state())["KV_grpo_test_node"]["config"]
    assert config["max_age"] == NODE_AGE_S * 10**9
    assert "allow_atomic" not in config or not config["allow_atomic"]


async def test_an_oversize_message_costs_only_its_own_connection(scene: Scene):
    before = await scene.guarded.state()
    client = scene.mallory.client
    lost = asyncio.Event()
    client._disconnected_cb = _setter(lost)
    client._max_payload = 1 << 30  # its own library would refuse
    await client.publish("grpo.v1.test.rollout.mallory", bytes((1 << 20) + 1))
    async with asyncio.timeout(5):
        await lost.wait()
    assert await scene.guarded.state() == before
    assert scene.bob._link.connected
    assert scene.bob._link._client.stats["reconnects"] == 0


def _setter(event: asyncio.Event) -> Any:
    async def note() -> None:
        event.set()

    return note
