"""A hostile sampler's messages that the broker lets through: verifiers and learners refuse and count."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from node.nats_bus import NatsBus
from node.system_clock import SystemClock
from protocol.codec import decode, decode_as, encode
from protocol.messages import DeadLetter, Head, VerifiedGroup
from protocol.reasons import DeadReason, StructureFault
from protocol.subjects import Bucket, Queue
from roles.learner.done import outcome_of
from roles.ring import Ring, cancelled
from roles.verifier.rewards.scorer import Scorer
from roles.verifier.verifier import Verifier
from tests.build import a_group, a_task, an_identity
from tests.contract.brokers import eventually
from tests.isolation.ground import Guarded
from tests.isolation.test_rights import GuardedWorld
from tests.protocol.forge import a_frame
from tests.roles.verifier.stage import RULES, Digits
from tests.sim.swarm import a_small_run

MALLORY = an_identity("mallory")


def by_mallory_as_bob() -> bytes:
    """A sound group that says bob sampled it, signed by mallory."""
    return encode(a_group(sampler="bob"), MALLORY)


def of_a_forged_task() -> bytes:
    """A group of a task that mallory wrote and signed itself, in a learner's name."""
    task = a_task(group_id="learner-1.7")
    frame = np.frombuffer(encode(task, MALLORY), np.uint8)
    return encode(a_group(task, sampler="mallory").model_copy(update={"task": frame}), MALLORY)


def altered_on_the_way() -> bytes:
    """A signed group with one byte changed."""
    frame = bytearray(encode(a_group(sampler="mallory"), MALLORY))
    frame[-100] ^= 1
    return bytes(frame)


ATTACKS = {
    "noise": (bytes(range(256)) * 10, DeadReason.UNDECODABLE, ""),
    "nothing": (b"", DeadReason.UNDECODABLE, ""),
    "deep": (a_frame(kind="RolloutGroup", body=b"[" * 200_000), DeadReason.UNDECODABLE, ""),
    "altered": (altered_on_the_way(), DeadReason.UNDECODABLE, ""),
    "another's name": (by_mallory_as_bob(), DeadReason.BAD_STRUCTURE, StructureFault.SAMPLER_MISMATCH),
    "a task of its own": (of_a_forged_task(), DeadReason.BAD_STRUCTURE, StructureFault.ISSUER_UNKNOWN),
    "another run": (
        encode(a_group(a_task(run="other"), sampler="mallory"), MALLORY),
        DeadReason.WRONG_RUN,
        "",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_what_is_malformed_or_signed_by_the_wrong_key_is_buried_and_work_goes_on(
    guarded: Guarded, attack: str
):
    frame, reason, fault = ATTACKS[attack]
    eve, mallory, bob, learner = [
        await guarded.bus(role, node=node)
        for role, node in (
            ("verifier", "eve"),
            ("sampler", "mallory"),
            ("sampler", "bob"),
            ("learner", "learner-1"),
        )
    ]
    known = {node: an_identity(node).public_key for node in ("bob", "mallory", "learner-1")}
    ring = Ring(eve, an_identity("eve"), guarded.spec, "verifier", SystemClock())
    verifier = Verifier(ring, RULES, Digits(), Scorer(guarded.spec.rewards), trust=known.get)
    working = asyncio.create_task(verifier.run(asyncio.Event()))
    try:
        await mallory.publish(Queue.ROLLOUT, frame, "evil")
        await bob.publish(Queue.ROLLOUT, encode(a_group(sampler="bob"), an_identity("bob")), "good")
        async with asyncio.timeout(20):
            delivery = await (await learner.consume(Queue.VERIFIED, 1)).next()
            passed = decode_as(delivery.data, VerifiedGroup)
            assert decode(passed.group.tobytes()).signer == known["bob"]

        async def both() -> bool:
            return verifier.verified + verifier.rejected == 2

        await eventually(both)
        (letter,) = [decode_as(each, DeadLetter) for each in await guarded.owner.dead_letters()]
        assert letter.reason is reason
        assert str(fault) in letter.detail
        assert (verifier.verified, verifier.rejected) == (1, 1)
    finally:
        await cancelled(working)


class Replaying(NatsBus):
    """A sampler that gives every group four times, under other ids."""

    async def publish(self, queue: Queue, data: bytes, message_id: str) -> None:
        """Store a message, and again."""
        for copy in range(4):
            await super().publish(queue, data, f"{message_id}-{copy}")


async def test_groups_that_are_given_again_and_again_are_trained_once(tmp_path: Path):
    guarded = await Guarded(tmp_path, spec=a_small_run(eval={"every": 0, "problems": 0})).open()
    try:
        world = GuardedWorld(guarded, tmp_path / "caches")
        for role, name in (("learner", "learner-1"), ("sampler", "mallory"), ("verifier", "eve")):
            access = await guarded.access(role, node=name)
            kind = Replaying if name == "mallory" else NatsBus
            bus = await kind.connect(access, guarded.spec.name, node=name)
            world._buses[name] = bus
        async with asyncio.timeout(60):
            peers = [world.verifier("eve"), world.sampler("mallory"), world.learner("learner-1")]
            await asyncio.gather(*(peer.work for peer in peers))
        (head,) = (await guarded.owner.list(Bucket.POLICY, "head")).values()
        done = await guarded.owner.list(Bucket.POLICY, "done")
        trained = [key for key, entry in done.items() if outcome_of(entry.value) == "trained"]
        assert decode_as(head.value, Head).groups_trained == len(trained)
        assert decode_as(head.value, Head).count == guarded.spec.learner.updates
    finally:
        await guarded.close()
