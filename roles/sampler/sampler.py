"""The sampler's loop: takes tasks, samples each group under one policy, passes the group on.

queue "task" ─▶ engine (newest policy, or exactly the pinned one) ─▶ queue "rollout"
                   ▲
heads ─▶ follower ─┘   in the background: running rollouts finish under the policy they began with
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import numpy as np

from protocol.clock import VectorClock
from protocol.codec import Signed
from protocol.errors import EngineError, MessageTooLarge, StoreError, StoreNotFound
from protocol.messages import RolloutGroup, Task
from protocol.ports import AdapterStore, Delivery, Offload
from protocol.reasons import DeadReason
from protocol.subjects import Queue
from roles.policy.compose import VERSION_ROUNDING
from roles.policy.follower import Arrival, PolicyFollower
from roles.policy.policies import Policies, PolicyVersion
from roles.ring import Ring, cancelled, until
from roles.sampler.conscience import Conscience
from roles.sampler.debuts import Debuts
from roles.sampler.engine import Engine, Sampled, SampleRequest
from roles.sampler.turns import Conversations

WHOLE_ENOUGH = 2
"""Rollouts below which a group that missed its deadline goes back to the queue."""

RELEASE_DELAY_S = 1.0

CONCLUDING_PART = 0.2
"""Last part of a drain, kept for passing on what is finished and handing back what is not."""


class Sampler:
    """One sampler of a run."""

    def __init__(
        self,
        ring: Ring,
        store: AdapterStore,
        engine: Engine,
        offload: Offload,
        drain_s: float = 30.0,
        conversations: Conversations | None = None,
    ) -> None:
        """``drain_s`` is how long a stop waits for groups in hand before it hands them back. With
        ``conversations``, rollouts have turns."""
        self._ring = ring
        self._engine = engine
        self._conversations = conversations
        self._drain_s = drain_s
        self._policies = Policies(ring, store, offload)
        self._follower = PolicyFollower(ring, self._policies, self._on_policy)
        self._conscience = Conscience(ring, self._reload)
        self._clocks: dict[str, VectorClock] = {}
        self._versions: dict[str, float] = {}
        """Of policies under which a group may still run."""
        self._pins: dict[str, int] = {}
        self._debuts = Debuts()
        self._newest: str | None = None
        self._ending = False
        self.busy = 0

    @property
    def clock(self) -> VectorClock:
        """Clock of the newest policy held."""
        return self._follower.current.clock if self._follower.current else VectorClock()

    async def run(self, stop: asyncio.Event) -> None:
        """Sample until ``stop``, then finish what is in hand. Raises StoreError if genesis is unusable."""
        async with asyncio.TaskGroup() as group:
            follower = group.create_task(self._follower.run())
            conscience = group.create_task(self._conscience.run()) if self._ring.spec.audit.rate else None
            await until(stop, self._follower.reach(VectorClock()))
            concluding = group.create_task(self._conclude(stop))
            async with asyncio.TaskGroup() as takers:
                for queue in (Queue.TASK, Queue.EVAL_TASK):
                    takers.create_task(self._take(queue, stop))
            await cancelled(follower, concluding, *([conscience] if conscience else []))

    async def _take(self, queue: Queue, stop: asyncio.Event) -> None:
        await self._ring.take_each(queue, self._credit(queue), self._handle, stop, self._drain_s)

    async def _conclude(self, stop: asyncio.Event) -> None:
        """Before the time of a drain is up, end what will not finish; others get its tasks at once."""
        await stop.wait()
        await self._ring.clock.sleep(self._drain_s * (1 - CONCLUDING_PART))
        self._ending = True
        await self._engine.conclude()

    def _credit(self, queue: Queue) -> int:
        """Groups to keep in hand: one batch that runs and one that waits, so that others get the rest."""
        spec = self._ring.spec
        rows = spec.sampling.group_size if queue is Queue.TASK else spec.eval.completions_per_problem
        return max(1, math.ceil(2 * self._engine.groups_max / rows))

    async def _handle(self, delivery: Delivery, queue: Queue) -> None:
        received = await self._ring.receive(delivery, queue, Task)
        if received is None:
            return
        task, signed = received
        self.busy += 1
        try:
            async with self._ring.alive(delivery):
                sampled = await self._sample(task)
                if len(sampled.rollouts) < self._enough(task):
                    self._ring.log.warning("group_unfinished", group=task.group_id)
                    await delivery.release(0.0 if self._ending else RELEASE_DELAY_S)
                    return
                await self._pass_on(task, signed, sampled, queue)
            await self._ring.settle(delivery)
        except (EngineError, StoreError) as exc:
            self._ring.log.warning("task_returned", group=task.group_id, error=str(exc))
            await delivery.release(0.0 if self._ending else RELEASE_DELAY_S)
        except MessageTooLarge as exc:
            detail = f"the group is too large to send: {exc}"
            await self._ring.bury(delivery, queue, DeadReason.BAD_STRUCTURE, detail, task.group_id)
        except asyncio.CancelledError:
            await delivery.release()
            raise
        finally:
            self.busy -= 1

    def _enough(self, task: Task) -> int:
        """Rollouts that make a group. One that ends before its deadline must be whole: which of its rollouts
        finish first is no accident, so verifiers refuse it."""
        return task.group_size if self._ending else min(WHOLE_ENOUGH, task.group_size)

    async def _sample(self, task: Task) -> Sampled:
        if task.pinned:
            return await self._sample_pinned(task)
        await self._catch_up(task)
        if self._conversations is not None:
            sampled = await self._sample_turns(task, self._conversations)
        else:
            sampled = await self._engine.sample(_request(task, None))
        if debut := self._debuts.take(sampled, self._ring.clock.monotonic()):
            await self._ring.tell("policy_sampled", **debut)
        return sampled

    async def _sample_turns(self, task: Task, conversations: Conversations) -> Sampled:
        """All turns under the policy that is newest now, unless it becomes too old between two of them."""
        name = self._newest
        if name is None:
            raise EngineError("no policy is loaded")
        async with self._kept(name):
            return await conversations.sample(
                self._engine,
                _request(task, name),
                self._ring.clock,
                lambda: name in self._versions,
                task.told,
            )

    async def _catch_up(self, task: Task) -> None:
        """Wait for a newer policy only if the present one is certain to be too old for the learner."""
        current = self._follower.current
        if current is None or task.clock <= current.clock:
            return
        behind = await self._policies.version(task.clock) - current.version
        if behind <= self._ring.spec.staleness.max_staleness + VERSION_ROUNDING:
            return
        since = self._ring.clock.monotonic()
        reached = asyncio.ensure_future(self._follower.reach(task.clock))
        patience = asyncio.ensure_future(self._ring.clock.sleep(task.deadline_s))
        try:
            await asyncio.wait({reached, patience}, return_when=asyncio.FIRST_COMPLETED)
            if not reached.done():
                raise StoreNotFound(f"no usable policy at {task.clock} within {task.deadline_s:g} s")
        finally:
            await cancelled(reached, patience)
            await self._ring.tell("policy_awaited", seconds=self._ring.clock.monotonic() - since)

    async def _sample_pinned(self, task: Task) -> Sampled:
        policy = await self._policies.at(task.clock)
        async with self._pinned(policy):
            await self._engine.load_policy(policy.name, policy.factors, newest=False)
            request = _request(task, policy.name)
            if self._conversations is not None:
                return await self._conversations.sample(
                    self._engine, request, self._ring.clock, _always, task.told
                )
            return await self._engine.sample(request)

    async def _on_policy(self, policy: PolicyVersion, arrival: Arrival) -> None:
        """A newer policy is whole: new rollouts start under it from now on."""
        started = self._ring.clock.monotonic()
        async with self._pinned(policy):  # until it is the newest, a pinned task that ends must not unload it
            await self._engine.load_policy(policy.name, policy.factors, newest=True)
            before, self._newest = self._newest, policy.name
            loaded = self._ring.clock.monotonic()
            self._debuts.loaded(policy, loaded)
            await self._ring.tell(
                "policy_loaded",
                version=policy.version,
                clock=policy.clock.text,
                waited_s=arrival.waited_s,
                fetch_s=arrival.fetch_s,
                compose_s=arrival.compose_s,
                load_s=loaded - started,
            )
        if before is not None:
            await self._retire(before)
        await self._abandon(policy)

    async def _reload(self) -> None:
        """Fetch and load the newest policy as if for the first time: something made it another one here."""
        if self._follower.current is None:
            return
        self._policies.forget()
        policy = await self._policies.at(self.clock)
        async with self._pinned(policy):
            await self._engine.unload_policy(policy.name)
            await self._engine.load_policy(policy.name, policy.factors, newest=True)
            self._newest = policy.name

    async def _abandon(self, newest: PolicyVersion) -> None:
        """Stop groups that began so long ago that learners at the newest policy would drop them.

        Their tasks go back to the queue, to begin anew under a policy that is of use.
        """
        self._versions[newest.name] = newest.version
        oldest = newest.version - self._ring.spec.staleness.max_staleness - VERSION_ROUNDING
        for name in [name for name, version in self._versions.items() if version < oldest]:
            del self._versions[name]
            await self._engine.abandon(name)

    @contextlib.asynccontextmanager
    async def _pinned(self, policy: PolicyVersion) -> AsyncIterator[None]:
        """Keep a policy resident while the body runs."""
        self._clocks[policy.name] = policy.clock
        async with self._kept(policy.name):
            yield

    @contextlib.asynccontextmanager
    async def _kept(self, name: str) -> AsyncIterator[None]:
        self._pins[name] = self._pins.get(name, 0) + 1
        try:
            yield
        finally:
            self._pins[name] -= 1
            await self._retire(name)

    async def _retire(self, name: str) -> None:
        """Unload a policy that nobody will start under again."""
        if name != self._newest and not self._pins.get(name):
            self._pins.pop(name, None)
            await self._engine.unload_policy(name)

    async def _pass_on(self, task: Task, signed: Signed, sampled: Sampled, queue: Queue) -> None:
        group = RolloutGroup(
            run=task.run,
            group_id=task.group_id,
            task=np.frombuffer(signed.frame, np.uint8),
            sampler=self._ring.identity.node,
            engine=self._engine.name,
            clock=self._clocks[sampled.policy],
            generation_s=sampled.generation_s,
            rollouts=sampled.rollouts,
        )
        onward = Queue.ROLLOUT if queue is Queue.TASK else Queue.EVAL_ROLLOUT
        await self._ring.send(onward, group, f"rollout:{task.group_id}")
        tokens = sum(len(rollout.token_ids) for rollout in sampled.rollouts)
        await self._ring.tell(
            "group_sampled",
            tokens=tokens,
            rollouts=len(sampled.rollouts),
            generation_s=sampled.generation_s,
            pinned=task.pinned,
            **_known(first_token_s=sampled.first_token_s, held_s=sampled.held_s),
        )


def _always() -> bool:
    return True


def _known(**times: float | None) -> dict[str, float]:
    """What the engine could tell."""
    return {name: seconds for name, seconds in times.items() if seconds is not None}


def _request(task: Task, policy: str | None) -> SampleRequest:
    return SampleRequest(
        task.prompt_token_ids, task.group_size, task.params, task.seed, policy, task.deadline_s
    )
