"""The collector: brings verified groups into the buffer and keeps their leases alive.

A group is acknowledged only after it was committed, so everything in the buffer stays unacknowledged
and is kept alive with ``in_progress``. A redelivered group that was committed already is recognised
by its ``done`` key.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import numpy as np

from protocol.clock import VectorClock
from protocol.codec import decode
from protocol.errors import DecodeError, StoreCorrupt, StoreNotFound
from protocol.messages import Rollout, RolloutGroup, Task, VerifiedGroup
from protocol.ports import Delivery
from protocol.reasons import DeadReason, DropReason
from protocol.subjects import Queue
from roles.learner.buffer import Buffer, Candidate
from roles.learner.done import is_done
from roles.learner.lease import Lease
from roles.policy.policies import Policies
from roles.ring import Ring

REWARD_MAX = 1e6
"""Rewards beyond this are a fault: their sums must stay finite."""


def nobody_is_refused(_key: str) -> str | None:
    """Without audits there is no quarantine."""
    return None


class Collector:
    """Feeds one learner's buffer from the shared queue."""

    def __init__(
        self,
        ring: Ring,
        buffer: Buffer,
        policies: Policies,
        credit: int,
        refusal: Callable[[str], str | None] = nobody_is_refused,
    ) -> None:
        """``credit`` bounds the groups this learner takes away from its peers; ``refusal`` says why nothing
        that a key signs is trained on."""
        self._refusal = refusal
        self._ring = ring
        self._buffer = buffer
        self._policies = policies
        self._credit = credit
        self.arrived = asyncio.Event()
        """Set whenever the buffer changed."""
        self.duplicates = 0

    async def run(self) -> None:
        """Collect for ever; cancel to stop."""
        consumer = await self._ring.consume(Queue.VERIFIED, self._credit)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.keep_alive())
                while True:
                    delivery = await consumer.next()
                    async with self._ring.alive(delivery):
                        await self._take_in(delivery)
                    self.arrived.set()
        finally:
            await consumer.close()

    async def keep_alive(self) -> None:
        """Send signs of life for everything in hand, for ever."""
        while True:
            await self._ring.clock.sleep(self._ring.spec.sampling.ack_wait_s / 3)
            for lease in self._buffer.leases.values():
                await lease.keep_alive()

    async def _take_in(self, delivery: Delivery) -> None:
        received = await self._ring.read(delivery, Queue.VERIFIED, VerifiedGroup)
        if received is None:
            return
        verified, _ = received
        group_id = verified.group_id
        lease = self._buffer.leases.get(group_id)
        if lease is not None and not lease.settled:
            self.duplicates += 1
            lease.add(delivery)
            return
        if await self._ring.persist(lambda: is_done(self._ring.bus, group_id)):
            self.duplicates += 1
            await self._ring.settle(delivery)
            return
        if await self._ring.given_up(delivery, Queue.VERIFIED, group_id):
            return
        try:
            signed = decode(verified.group.tobytes())
            if refusal := self._refusal(signed.signer):
                await self._ring.bury(delivery, Queue.VERIFIED, DeadReason.QUARANTINED, refusal, group_id)
                return
            candidate = await self._open(verified, signed.expect(RolloutGroup), delivery)
        except (DecodeError, StoreCorrupt, StoreNotFound, ValueError) as exc:
            detail = f"{type(exc).__name__}: {exc}"
            await self._ring.bury(delivery, Queue.VERIFIED, DeadReason.BAD_STRUCTURE, detail, group_id)
            return
        if candidate.group.clock <= self._policies.newest:
            self._buffer.put(candidate)
        else:  # after a fresh look: a fault of its sender
            self._buffer.drop(candidate, DropReason.AHEAD)

    async def _open(self, verified: VerifiedGroup, group: RolloutGroup, delivery: Delivery) -> Candidate:
        task = decode(group.task.tobytes()).expect(Task)
        if why := fault(task, group, verified):
            raise ValueError(why)
        if not group.clock <= self._policies.newest:
            await self._ring.persist(self._policies.read_heads)
        return Candidate(task, group, verified, Lease(delivery), await self._version(group.clock))

    async def _version(self, clock: VectorClock) -> float:
        """The version under which a group started. Raises StoreNotFound for a clock ahead of every head."""
        try:
            return await self._ring.persist(lambda: self._policies.version(clock))
        except StoreNotFound:
            newest = await self._ring.persist(self._policies.read_heads)
            if not clock <= newest:
                raise
        try:
            return await self._ring.persist(lambda: self._policies.version(clock))
        except StoreNotFound:
            return -math.inf  # older than what the store keeps: too old for any step


def fault(task: Task, group: RolloutGroup, verified: VerifiedGroup) -> str | None:
    """Why a verified group cannot be trained on whatever its verifier says, or None (pure).

    A verifier is a peer as well: what could stop a step is looked at again.
    """
    if {group.group_id, task.group_id} != {verified.group_id}:
        return "the ids of task, group and verdicts differ"
    if [v.index for v in verified.verdicts] != [r.index for r in group.rollouts]:
        return "verdicts and rollouts do not match"
    if any(v.reward is not None and abs(v.reward) > REWARD_MAX for v in verified.verdicts):
        return f"a reward beyond {REWARD_MAX:g}"
    return next((why for rollout in group.rollouts if (why := _rollout_fault(rollout))), None)


def _rollout_fault(rollout: Rollout) -> str | None:
    if len(rollout.token_ids) != len(rollout.sampler_logprobs) or not len(rollout.token_ids):
        tokens, logprobs = len(rollout.token_ids), len(rollout.sampler_logprobs)
        return f"rollout {rollout.index}: {tokens} tokens, {logprobs} log-probabilities"
    if rollout.loss_mask is not None and len(rollout.loss_mask) != len(rollout.token_ids):
        return (
            f"rollout {rollout.index}: a mask of {len(rollout.loss_mask)} for {len(rollout.token_ids)} tokens"
        )
    if not rollout.sampled.any():
        return f"rollout {rollout.index}: no token that was sampled"
    if not np.isfinite(rollout.sampler_logprobs).all():
        return f"rollout {rollout.index}: a log-probability is not finite"
    return None
