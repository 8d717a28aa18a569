"""A broker with accounts, as a fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.limits import INLINE_BYTES_MAX
from protocol.subjects import Bucket, Queue
from tests.isolation.ground import Guarded
from tests.isolation.scene import Scene

LARGE = bytes(INLINE_BYTES_MAX + 1)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    guarded = await Guarded(tmp_path).open()
    yield guarded
    await guarded.close()


@pytest.fixture
async def scene(guarded: Guarded) -> Scene:
    learner, bob, verifier = [
        await guarded.bus(role, node=node)
        for role, node in (("learner", "learner-1"), ("sampler", "bob"), ("verifier", "eve"))
    ]
    await guarded.owner.put(Bucket.RUN, "spec", b"settings")
    await learner.put(Bucket.POLICY, "head.learner-1", b"head", expected=0)
    for number in range(3):
        await learner.publish(Queue.TASK, b"task", f"t{number}")
    await bob.publish(Queue.ROLLOUT, b"bob's work", "r1")
    await bob.publish(Queue.ROLLOUT, LARGE, "r2")
    await verifier.publish(Queue.VERIFIED, b"verdict", "v1")
    await bob.put(Bucket.NODE, "node.bob", b"bob is here")
    await bob.bury(b"letter")
    return Scene(guarded, learner, bob, verifier, await guarded.hand("sampler", node="mallory"))
