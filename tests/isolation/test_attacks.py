"""A hostile sampler with a valid login, against a real server: nothing changes, and it learns nothing."""

from __future__ import annotations

import asyncio
import json

import nats
from nats.aio.msg import Msg

from protocol.limits import INLINE_BYTES_MAX, SAMPLER_PAYLOADS_MAX
from protocol.subjects import Bucket, Queue
from tests.isolation.ground import Hand, drained
from tests.isolation.scene import Scene

API = "$JS.API"
LARGE = bytes(INLINE_BYTES_MAX + 1)
EVIL = b"evil"


PROTECTED = (
    "$KV.grpo_test_policy.head.learner-1",
    "$KV.grpo_test_policy.head.mallory",
    "$KV.grpo_test_policy.done.learner-1.0",
    "$KV.grpo_test_run.spec",
    "$KV.grpo_test_run.finished",
    "$KV.grpo_test_run.cursor.learner-1",
    "$KV.grpo_test_node.node.bob",
    "grpo.v1.test.verified.mallory",
    "grpo.v1.test.verified.eve",
    "grpo.v1.test.task.mallory",
    "grpo.v1.test.eval.task.learner-1",
    "grpo.v1.test.rollout.bob",
    "grpo.v1.test.rollout",
    "grpo.v1.test.dead.bob",
    "grpo.v1.test.event.sampler.bob",
    "grpo.v1.test.event.learner.mallory",
    "grpo.v1.other.rollout.mallory",
    "$O.grpo_test_blob_rollout.C.bob.0",
    f"$O.grpo_test_blob_rollout.C.mallory.{SAMPLER_PAYLOADS_MAX}",
    "$O.grpo_test_blob_task.C.learner-1.x",
    "$O.grpo_test_blob_verified.C.eve.x",
    "$JS.ACK.grpo_test_rollout.verifiers.1.1.1.1.0",
)


async def test_it_writes_nothing_that_is_not_its_own(scene: Scene):
    before = await scene.guarded.state()
    for subject in PROTECTED:
        assert await scene.mallory.ask(subject, EVIL) is None, subject
        assert await scene.mallory.ask(subject, EVIL, Nats_Rollup="sub") is None, subject
    await scene.unchanged_by(before)


CHANGES = (
    "STREAM.PURGE.{s}",
    "STREAM.DELETE.{s}",
    "STREAM.UPDATE.{s}",
    "STREAM.MSG.DELETE.{s}",
    "STREAM.SNAPSHOT.{s}",
    "STREAM.RESTORE.{s}",
    "STREAM.CREATE.mine",
    "CONSUMER.CREATE.{s}",
    "CONSUMER.CREATE.{s}.mine",
    "CONSUMER.DURABLE.CREATE.{s}.mine",
    "CONSUMER.DELETE.{s}.{c}",
    "CONSUMER.PAUSE.{s}.{c}",
    "CONSUMER.RESET.{s}.{c}",
    "CONSUMER.UNPIN.{s}.{c}",
)
STREAMS = (
    ("grpo_test_task", "samplers"),
    ("grpo_test_rollout", "verifiers"),
    ("grpo_test_verified", "learners"),
    ("KV_grpo_test_policy", "x"),
    ("KV_grpo_test_node", "x"),
    ("OBJ_grpo_test_blob_rollout", "x"),
)


async def test_it_empties_alters_and_creates_nothing(scene: Scene):
    before = await scene.guarded.state()
    asked = [
        (f"{API}.{call.format(s=stream, c=consumer)}", stream)
        for call in CHANGES
        for stream, consumer in STREAMS
    ]
    body = {
        "name": "mine",
        "stream_name": "{s}",
        "config": {"name": "mine", "deliver_subject": "here"},
        "seq": 1,
    }
    answers = await asyncio.gather(
        *(
            scene.mallory.ask(subject, json.dumps(body | {"stream_name": stream}).encode())
            for subject, stream in asked
        )
    )
    assert answers == [None] * len(asked)
    for subject in ("$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.CLAIMS.DELETE", "$SYS.REQ.SERVER.PING"):
        assert await scene.mallory.ask(subject, EVIL) is None
    await scene.unchanged_by(before)


SECRETS = (
    f"{API}.DIRECT.GET.grpo_test_rollout",
    f"{API}.DIRECT.GET.grpo_test_rollout.grpo.v1.test.rollout.bob",
    f"{API}.DIRECT.GET.grpo_test_verified",
    f"{API}.DIRECT.GET.grpo_test_dead",
    f"{API}.DIRECT.GET.grpo_test_event",
    f"{API}.DIRECT.GET.OBJ_grpo_test_blob_rollout",
    f"{API}.DIRECT.GET.OBJ_grpo_test_blob_verified",
    f"{API}.DIRECT.GET.KV_grpo_test_run.$KV.grpo_test_run.cursor.learner-1",
    f"{API}.STREAM.MSG.GET.grpo_test_rollout",
    f"{API}.STREAM.MSG.GET.grpo_test_task",
    f"{API}.CONSUMER.MSG.NEXT.grpo_test_rollout.verifiers",
    f"{API}.CONSUMER.MSG.NEXT.grpo_test_verified.learners",
    f"{API}.CONSUMER.INFO.grpo_test_rollout.verifiers",
    f"{API}.CONSUMER.LIST.grpo_test_task",
    f"{API}.STREAM.INFO.grpo_test_rollout",
    f"{API}.STREAM.LIST",
    f"{API}.STREAM.NAMES",
)


async def test_it_reads_no_rollouts_verdicts_letters_or_payloads_of_others(scene: Scene):
    before = await scene.guarded.state()
    for subject in SECRETS:
        for body in ({"seq": 1}, {"last_by_subj": "grpo.v1.test.rollout.bob"}, {"batch": 1}):
            assert await scene.mallory.ask(subject, json.dumps(body).encode()) is None, subject
        assert await scene.mallory.ask(subject) is None, subject
    await scene.unchanged_by(before)


async def test_it_overhears_nothing_but_announced_heads(scene: Scene):
    heard: list[str] = []

    async def listen(msg: Msg) -> None:
        heard.append(msg.subject)

    await scene.mallory.client.subscribe(">", cb=listen)
    await scene.mallory.client.flush()
    await scene.bob.publish(Queue.ROLLOUT, b"more work", "r3")
    await scene.bob.emit("sampler", "bob", b"event")
    await scene.verifier.publish(Queue.VERIFIED, b"verdict", "v2")
    await (await (await scene.verifier.consume(Queue.ROLLOUT, 1)).next()).ack()
    await scene.learner.put(Bucket.POLICY, "head.learner-1", b"newer")
    await drained(scene.bob, scene.verifier, scene.learner)
    async with asyncio.timeout(5):
        while not heard:  # the announcement is the last thing that was caused
            await scene.mallory.client.flush()
    assert heard == ["grpo.v1.test.announce.learner-1"]


async def test_an_announcement_of_its_own_reaches_nobody(scene: Scene):
    feed = scene.learner.announcements()
    await scene.mallory.shout("grpo.v1.test.announce.learner-1", EVIL)
    await scene.learner.put(Bucket.POLICY, "head.learner-1", b"newer")
    async with asyncio.timeout(5):
        assert (await anext(feed)).value == b"newer"


async def test_a_reply_that_is_redirected_lands_nowhere(scene: Scene):
    """The confused deputy: let the server write what one may not, by naming it as the reply subject."""
    hand = scene.mallory
    assert await hand.ask("$KV.grpo_test_node.node.mallory", EVIL) is not None
    before = await scene.guarded.state()
    own = "$KV.grpo_test_node.node.mallory"
    for target in (*PROTECTED, f"_INBOX_bob.{'x' * 22}.1"):
        for reply in {hand.access.local(target), target}:
            for request, body in (
                (f"{API}.DIRECT.GET.KV_grpo_test_node", json.dumps({"last_by_subj": own}).encode()),
                (f"{API}.DIRECT.GET.KV_grpo_test_node", json.dumps({"multi_last": [own]}).encode()),
                (f"{API}.CONSUMER.INFO.grpo_test_task.samplers", b""),
                (f"{API}.STREAM.INFO.KV_grpo_test_run", b""),
                (f"{API}.DIRECT.GET.KV_grpo_test_run.$KV.grpo_test_run.spec", b""),
            ):
                await hand.client.publish(hand.access.local(request), body, reply)
    await scene.unchanged_by(before)


async def test_tasks_that_it_pulls_into_a_protected_subject_are_written_nowhere(scene: Scene):
    before = await scene.guarded.state()
    pull = scene.mallory.access.local(f"{API}.CONSUMER.MSG.NEXT.grpo_test_task.samplers")
    for target in PROTECTED[:3]:
        await scene.mallory.client.publish(pull, b'{"batch": 1, "expires": 1000000000}', target)
    await scene.unchanged_by(before)
    # They are as good as taken by a sampler that died, and come back.
    consumer = await scene.bob.consume(Queue.TASK, 3)
    async with asyncio.timeout(10):
        assert [(await consumer.next()).data for _ in range(3)] == [b"task"] * 3


async def test_whoever_has_the_right_is_answered_by_the_same_means(scene: Scene):
    """The attacks above would be seen to succeed: the owner's login does all of it."""
    client = await nats.connect(
        scene.guarded.broker.url, user_credentials=str(scene.guarded.broker.access.credentials)
    )
    try:
        owner = Hand(client, scene.guarded.broker.access)
        there = [subject for subject in PROTECTED if subject.endswith((".bob", ".eve", ".mallory", ".x"))]
        assert [s for s in there if ".other." not in s and await owner.ask(s, EVIL) is None] == []
        assert await owner.ask(SECRETS[0], b'{"seq": 99999999}') is not None  # "not found"
        assert await owner.ask(f"{API}.STREAM.PURGE.grpo_test_rollout") is not None
    finally:
        await client.close()
