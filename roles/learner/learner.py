"""The learner's loop: takes verified groups, makes one update after another, never waits to publish.

    queue "verified" ─▶ collector ─▶ buffer ─▶ step ─▶ committer ─▶ store and head (announced to all)
                                       ▲                   │
    queue "task" ◀── issuer ◀──────────┴── acknowledged ◀──┘

| loop       | consumes            | waits for                       | unblocked by            |
|------------|---------------------|---------------------------------|-------------------------|
| issuer     | the broker's counts | room below the admission bound  | a commit, half a second |
| collector  | verified groups     | the broker                      | a verifier              |
| merger     | peers' heads        | broker and store                | a peer's commit         |
| step       | the buffer          | ``groups_per_update`` groups    | the collector           |
| committer  | finished steps      | store and broker                | the step                |
| caretaker  | committed heads     | store, evaluation               | the committer           |
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Sequence

from protocol.clock import GENESIS, VectorClock
from protocol.messages import Head
from protocol.ports import AdapterStore, Offload
from roles.learner.batch import Batch, make_batch
from roles.learner.buffer import Buffer, Candidate, Dropped
from roles.learner.caretaker import Caretaker, Committed
from roles.learner.checkpoint import claim_genesis, find_head, load_state
from roles.learner.collector import Collector
from roles.learner.committer import GROUPS_MAX, STEPS_WAITING_MAX, Committer, FinishedStep, nothing_committed
from roles.learner.done import is_done
from roles.learner.evaluation import Evaluator
from roles.learner.finish import finish_run
from roles.learner.issuer import Issuer, TaskStream
from roles.learner.janitor import Janitor
from roles.learner.merger import Merger
from roles.learner.peers import Peers
from roles.learner.policy import Policy
from roles.learner.register import Published, Register
from roles.learner.step_report import step_fields
from roles.learner.stepper import SafePoint, StepOutcome, Stepper
from roles.learner.witness import Witness
from roles.policy.compose import VERSION_ROUNDING
from roles.policy.policies import Policies, Update
from roles.ring import Ring, cancelled, nap, until
from roles.standings import Standings
from roles.tasks.prompts import Prompt

IDLE_STEPS_MAX = 50
"""Steps in a row without any gradient (every group solved or failed alike) after which a run ends."""

DROPS_WAIT_S = 1.0
"""How long drops wait for a step to be committed with before they are committed alone."""


class Learner:
    """One learner of a run."""

    def __init__(
        self,
        ring: Ring,
        store: AdapterStore,
        policy: Policy,
        *,
        offload: Offload,
        aside: Offload,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
    ) -> None:
        """``offload`` runs what touches the policy, ``aside`` what prepares and reads files, so that no
        upload ever waits for a step; nothing happens before ``run``."""
        self._ring = ring
        self._spec = ring.spec
        self._store = store
        self._policy = policy
        self._offload = offload
        self._aside = aside
        self._policies = Policies(ring, store, aside)
        staleness, learner = ring.spec.staleness, ring.spec.learner
        self._buffer = Buffer(staleness.max_staleness, causal=staleness.causal)
        steps_in_hand = learner.publish_every + STEPS_WAITING_MAX + 1
        credit = learner.groups_per_update * steps_in_hand
        standings = Standings(ring)
        self._collector = Collector(ring, self._buffer, self._policies, credit, standings.refusal)
        witness = Witness(ring, store)
        self._merger = Merger(ring, self._policies, witness, self._merged, self._collector.arrived)
        self._committer = Committer(ring, store, aside, self._on_commit)
        self._evaluator = Evaluator(ring, held_out)
        self._peers = Peers(ring)
        self._janitor = Janitor(ring, store, lambda: self._peers.states, self._policies.heads.values)
        leads, kept = lambda: self._peers.leads, self._janitor.kept
        self._caretaker = Caretaker(ring, store, aside, self._evaluator, leads, kept)
        stream = TaskStream(ring.spec, ring.identity.node, train)
        alone = self._committer.check_stands
        self._issuer = Issuer(ring, stream, lambda: self.clock, lambda: self._peers.count, alone)
        self._feeders = (self._issuer, self._collector)
        behind_the_step = (self._committer, self._merger, self._evaluator, self._caretaker)
        audits = (standings,) if ring.spec.audit.rate else ()
        self._keepers = (*behind_the_step, self._peers, self._janitor, *audits)
        self._unpublished: list[Candidate] = []
        self._idle_steps = 0
        self.clock = GENESIS
        """Clock of the newest committed policy."""

    @property
    def busy(self) -> int:
        """Groups in hand."""
        return len(self._buffer.leases)

    @property
    def needs(self) -> tuple[VectorClock, ...]:
        """Clocks whose updates must stay in the store."""
        return self._evaluator.clocks

    async def run(self, stop: asyncio.Event) -> None:
        """Learn until the run's last update, or until ``stop``. Raises FencedError if another process
        writes under this learner's id, StoreError if genesis cannot be used."""
        await self._begin()
        async with asyncio.TaskGroup() as group:
            feeders = [group.create_task(part.run()) for part in self._feeders]
            keepers = [group.create_task(part.run()) for part in self._keepers]
            await self._train_for_good(stop)
            await cancelled(*feeders)
            await self._hand_back()
            await self._conclude(stop)
            await cancelled(*keepers)

    async def _train_for_good(self, stop: asyncio.Event) -> None:
        """Train to the end, and on from the last committed point if the last steps could not be committed."""
        while True:
            await self._train(stop)
            await self._committer.drained()
            if not self._committer.conflict:
                return
            await self._roll_back()

    async def _hand_back(self) -> None:
        """Give what no step will use to other learners, or to this one's next process."""
        leases = self._buffer.leases
        for lease in leases.values():
            await lease.release()
        self._buffer.forget(leases)

    async def _conclude(self, stop: asyncio.Event) -> None:
        """One learner ends the run: it evaluates the last policy and tells everybody."""
        if self._finished:
            await self._peers.until_leading(stop)
        if not self._finished or self._peers.finished or stop.is_set():
            await self._caretaker.finish(stop, finished=False)
            return
        # Unless somebody who did not see us ends it meanwhile: then nobody is left to evaluate with.
        await until(self._peers.over, self._caretaker.finish(stop, finished=True))
        if not (self._peers.over.is_set() or stop.is_set()):
            await finish_run(self._ring, self._store, self._stepper.register.version)

    @property
    def _finished(self) -> bool:
        reached = self._stepper.register.version >= self._spec.learner.updates - VERSION_ROUNDING
        return reached or self._idle_steps >= IDLE_STEPS_MAX or self._peers.finished

    async def _begin(self) -> None:
        """Claim or find genesis, go to the last committed head, restore what goes with it."""
        await claim_genesis(self._ring, self._store, self._policy, self._offload)
        await self._policies.start()
        register = Register(self._ring.identity.node, self._policies.genesis, self._spec.learner)
        resumed = await find_head(self._ring, self._store)
        await self._committer.begin(resumed, self._policies.genesis_digest)
        head = resumed.head or nothing_committed(self._spec.name, self._ring.identity.node)
        self._policies.note_head(head, self._ring.identity.public_key if resumed.head else "")
        if head.count:
            own = functools.partial(self._policies.update, head.learner, head.count)
            update = await self._ring.insist(own)
            register.resume(update.factors, head.count, head.weight)
            self._caretaker.start_at(head.count)
        self._stepper = await self._offload(lambda: Stepper(self._policy, register, self._ring.clock))
        await self._peers.look()
        for update in await self._merger.catch_up(head.clock):
            await self._merge(update)
        if head.count:
            state = await load_state(self._ring, self._store, self._aside, head)
            if state is not None:
                await self._offload(lambda: self._stepper.load_state(state))
            await self._ring.tell("learner_resumed", clock=head.clock.text, version=register.version)
        await self._issuer.resume(head)
        self._safe = await self._offload(self._stepper.safe_point)
        self.clock = register.clock
        self._committer.version = register.version
        if register.version == 0 and self._policies.genesis_author == self._ring.identity.node:
            await self._caretaker.evaluate(self.clock, 0.0)

    async def _train(self, stop: asyncio.Event) -> None:
        while not self._finished:
            waiting_since = self._ring.clock.monotonic()
            candidates = await self._next_groups(stop)
            if not candidates:
                return
            await self._step(candidates, self._ring.clock.monotonic() - waiting_since)

    async def _next_groups(self, stop: asyncio.Event) -> list[Candidate]:
        """The next step's groups, or none once ``stop`` is set. Rolls back and commits drops meanwhile."""
        count = self._spec.learner.groups_per_update
        waiting_since = self._ring.clock.monotonic()
        while not stop.is_set() and not self._finished:
            if self._committer.conflict:
                await self._roll_back()
            await self._merge_peers()
            register = self._stepper.register
            if self._buffer.ready(count, register.clock, register.version):
                return self._buffer.take(count, register.clock, register.version)
            await until(stop, nap(self._ring.clock, DROPS_WAIT_S, self._collector.arrived))
            now = self._ring.clock.monotonic()
            if self._buffer.drops_waiting and now - waiting_since >= DROPS_WAIT_S:
                await self._submit((), None, None)
                waiting_since = now
        return []

    async def _step(self, candidates: list[Candidate], wait_s: float) -> None:
        register = self._stepper.register
        batch = make_batch(candidates, self._spec.loss, register.clock, register.version)
        weight = self._spec.learner.update_weight or 1 / self._peers.count
        every = self._spec.learner.publish_every
        outcome = await self._offload(lambda: self._stepper.step(batch, weight, every))
        self._idle_steps = 0 if outcome.result.updated else self._idle_steps + 1
        self._unpublished += candidates
        blocked_s = 0.0
        if outcome.after is not None:
            trained, self._unpublished = tuple(self._unpublished), []
            blocked_s = await self._submit(trained, outcome.published, outcome.after)
        await self._report(batch, outcome, wait_s, blocked_s)

    async def _submit(
        self, trained: tuple[Candidate, ...], published: Published | None, after: SafePoint | None
    ) -> float:
        dropped = tuple(self._buffer.take_dropped(GROUPS_MAX - len(trained)))
        tasks = self._issuer.outstanding
        step = FinishedStep(trained, dropped, published, after, tasks.cursor, tasks.floor)
        return await self._committer.submit(step)

    def _on_commit(self, step: FinishedStep, head: Head, listed: Collection[str]) -> None:
        self._buffer.forget(step.group_ids)
        self._issuer.settled(step.group_ids)
        self._issuer.wake.set()
        if step.after is None:
            return  # only drops: this learner stands where it stood
        self._safe = step.after
        self.clock = step.after.register.clock
        if step.published is not None:
            published = step.published
            self._janitor.committed(head.path, head.count, head.weight, listed)
            newest = Committed(head, published.version, step.after.state, published.policy)
            self._caretaker.committed(newest)

    async def _roll_back(self) -> None:
        """A peer consumed a group of the oldest waiting step: nothing since the last commit happened."""
        steps = self._committer.take_conflict()
        trained = [candidate for step in steps for candidate in step.trained] + self._unpublished
        self._unpublished = []
        dropped = [drop for step in steps for drop in step.dropped]
        await self._offload(lambda: self._stepper.restore(self._safe))
        self._merger.wake.set()  # what was merged since is lacking again
        kept = [c for c in trained if not await self._settled_elsewhere(c)]
        kept_drops = [d for d in dropped if not await self._settled_elsewhere(d)]
        self._buffer.put_back(kept, kept_drops)
        await self._ring.tell("step_rolled_back", steps=len(steps), groups_returned=len(kept))

    async def _settled_elsewhere(self, group: Candidate | Dropped) -> bool:
        if not await self._ring.persist(lambda: is_done(self._ring.bus, group.group_id)):
            return False
        await group.lease.settle(self._ring)
        self._buffer.forget([group.group_id])
        return True

    async def _merge_peers(self) -> None:
        """Between steps, take in what peers have published meanwhile; unpublished progress is kept."""
        await self._committer.check_alone(self._policies.heads.get(self._ring.identity.node))
        for update in self._merger.take(self._stepper.register.clock):
            await self._merge(update)

    def _merged(self) -> VectorClock:
        return self._stepper.register.clock

    async def _merge(self, update: Update) -> None:
        author = update.manifest.author
        await self._offload(lambda: self._stepper.merge(author, update))

    async def _report(self, batch: Batch, outcome: StepOutcome, wait_s: float, blocked_s: float) -> None:
        fields = step_fields(batch, outcome, wait_s, blocked_s) | {
            "version": self._stepper.register.version,
            "rollout/inflight": self._issuer.in_flight,
            "sample/rollout_queue_size": len(self._buffer),
        }
        await self._ring.tell("step_trained", **fields)
