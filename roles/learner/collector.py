"""The collector: brings verified groups into the buffer and keeps their leases alive.

A group is acknowledged only after it was committed, so everything in the buffer stays unacknowledged
and is kept alive with ``in_progress``. A redelivered group that was committed already is recognised
by its ``done`` key.
"""

from __future__ import annotations

import asyncio

from protocol.codec import decode
from protocol.errors import DecodeError, StoreError
from protocol.messages import RolloutGroup, Task, VerifiedGroup
from protocol.ports import Delivery
from protocol.reasons import DeadReason
from protocol.subjects import Bucket, Queue, done_key
from roles.learner.buffer import Buffer, Candidate
from roles.policy.policies import Policies
from roles.ring import Ring


class Collector:
    """Feeds one learner's buffer from the shared queue."""

    def __init__(self, ring: Ring, buffer: Buffer, policies: Policies, credit: int) -> None:
        """``credit`` bounds the groups this learner takes away from its peers."""
        self._ring = ring
        self._buffer = buffer
        self._policies = policies
        self._credit = credit
        self.arrived = asyncio.Event()
        """Set whenever the buffer changed."""
        self.duplicates = 0

    async def run(self) -> None:
        """Collect for ever; cancel to stop."""
        consumer = await self._ring.bus.consume(Queue.VERIFIED, self._credit)
        beats = asyncio.create_task(self._keep_alive())
        try:
            while True:
                await self._take_in(await consumer.next())
                self.arrived.set()
        finally:
            beats.cancel()
            await consumer.close()

    async def _take_in(self, delivery: Delivery) -> None:
        received = await self._ring.receive(delivery, Queue.VERIFIED, VerifiedGroup)
        if received is None:
            return
        verified, _ = received
        if await self._known(verified.group_id):
            self.duplicates += 1
            await self._ring.settle(delivery)
            return
        try:
            candidate = await self._open(verified, delivery)
        except (DecodeError, StoreError, ValueError) as exc:
            detail = f"{type(exc).__name__}: {exc}"
            await self._ring.bury(
                delivery, Queue.VERIFIED, DeadReason.BAD_STRUCTURE, detail, verified.group_id
            )
            return
        self._buffer.put(candidate)

    async def _known(self, group_id: str) -> bool:
        if group_id in self._buffer:
            return True
        key = done_key(group_id)
        return await self._ring.persist(lambda: self._ring.bus.get(Bucket.POLICY, key)) is not None

    async def _open(self, verified: VerifiedGroup, delivery: Delivery) -> Candidate:
        group = decode(verified.group.tobytes()).expect(RolloutGroup)
        task = decode(group.task.tobytes()).expect(Task)
        if {group.group_id, task.group_id} != {verified.group_id}:
            raise ValueError("the ids of task, group and verdicts differ")
        if [v.index for v in verified.verdicts] != [r.index for r in group.rollouts]:
            raise ValueError("verdicts and rollouts do not match")
        return Candidate(task, group, verified, delivery, await self._policies.version(group.clock))

    async def _keep_alive(self) -> None:
        while True:
            await self._ring.clock.sleep(self._ring.spec.sampling.ack_wait_s / 3)
            for delivery in self._buffer.deliveries():
                await delivery.in_progress()
