"""The committer: makes steps permanent, in order, behind the next step.

    finished step ─▶ upload update, then manifest ─▶ one atomic commit: done.<group>… and head ─▶ acknowledge

Before the commit nothing happened and the groups go to someone else; after it a redelivery finds its
``done`` key. If a peer consumed one of the groups meanwhile, nothing is stored, the upload is removed and
the step is rolled back. ``commit.py`` settles what is unclear.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from protocol.clock import GENESIS
from protocol.limits import BATCH_WRITES_MAX
from protocol.messages import Head
from protocol.ports import AdapterStore, Offload
from roles.learner.buffer import Candidate, Dropped
from roles.learner.commit import Conflict, HeadWriter, Resumed
from roles.learner.lease import Lease
from roles.learner.register import Published
from roles.learner.stepper import SafePoint
from roles.learner.update_entry import update_entry
from roles.policy.chains import TRAINED
from roles.policy.update_paths import counts_by_path, updates_of
from roles.ring import Ring

STEPS_WAITING_MAX = 3
"""Finished steps that may wait for their commit before the next step is held up."""

GROUPS_MAX = BATCH_WRITES_MAX - 1
"""Groups of one commit; the head is its last write."""


Upload = Callable[[], Awaitable[None]]
"""Puts an update into the store; again is harmless."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step's outcome, to be made permanent.

    Without ``published`` its groups changed nothing; without ``after`` there was no step at all, and only
    drops are committed.
    """

    trained: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    published: Published | None
    after: SafePoint | None
    cursor: int
    floor: int

    @property
    def consumed(self) -> dict[str, str]:
        """Outcome of each group."""
        return {candidate.group_id: TRAINED for candidate in self.trained} | self.drops

    @property
    def drops(self) -> dict[str, str]:
        """Reason of each group that was dropped."""
        return {drop.group_id: drop.reason.value for drop in self.dropped}

    @property
    def leases(self) -> list[Lease]:
        """Everything to acknowledge once this is committed."""
        return [c.lease for c in self.trained] + [d.lease for d in self.dropped]

    @property
    def group_ids(self) -> list[str]:
        """Every group this step consumes."""
        return list(self.consumed)


class Committer:
    """One learner's way to permanence."""

    def __init__(
        self,
        ring: Ring,
        store: AdapterStore,
        offload: Offload,
        on_commit: Callable[[FinishedStep, Head, Collection[str]], None],
    ) -> None:
        """``on_commit`` is called after each commit, once the groups are acknowledged; it also gets every
        group that a new update's manifest lists."""
        self._ring = ring
        self._store = store
        self._offload = offload
        self._on_commit = on_commit
        self._waiting: deque[FinishedStep] = deque()
        self._moved = asyncio.Condition()
        self._writer = HeadWriter(ring)
        self._genesis = ""
        self._unlisted: dict[str, str] = {}
        """Groups consumed since the newest upload: no manifest lists them yet."""
        self.version = 0.0
        """Of the newest committed policy."""
        self.conflict = False
        """The oldest waiting step cannot be committed; the loop must roll back."""

    async def begin(self, resumed: Resumed, genesis: str) -> None:
        """Go on from this learner's own last head, and remove what it uploaded but never committed.

        ``genesis`` is the digest of the run's genesis. Raises FencedError if another process writes the head.
        """
        self._genesis, self._unlisted = genesis, dict(resumed.unlisted)
        self._writer.resume(resumed)
        head = resumed.head or nothing_committed(self._ring.spec.name, self._ring.identity.node)
        # Before this process is known: what a later one of this name uploads is not for it to remove.
        proven = head.count > 0  # The store allowed this before; what it denies now is worth the wait.
        updates = updates_of(head.run, head.learner)
        listed = await self._ring.persist(lambda: self._store.list(updates), patient=proven)
        # From now on nothing that an earlier process may have sent can be stored: it expects another head.
        await self._writer.commit(head.model_copy(update={"nonce": self._ring.nonce()}), {})
        counts = counts_by_path(listed)
        if strange := [path for path in listed if path not in counts]:
            self._ring.log.warning("entries_not_ours", count=len(strange), first=strange[0])
        for path, count in counts.items():
            if count > head.count or (count == head.count and path != head.path):
                await self._ring.persist(functools.partial(self._store.delete, path), patient=proven)
                self._ring.log.info("upload_removed", path=path)

    async def check_alone(self, seen: Head | None) -> None:
        """Raises FencedError if another process wrote ``seen``, a head under this learner's name."""
        if seen is not None:
            await self._writer.check_alone(seen)

    async def check_stands(self) -> None:
        """Raises FencedError if the head that stands was written by another process."""
        await self._writer.check_stands()

    async def submit(self, step: FinishedStep) -> float:
        """Queue a step; returns the seconds for which the queue was full."""
        started = self._ring.clock.monotonic()
        async with self._moved:
            await self._moved.wait_for(lambda: len(self._waiting) < STEPS_WAITING_MAX or self.conflict)
            blocked_s = self._ring.clock.monotonic() - started
            self._waiting.append(step)
            self._moved.notify_all()
        return blocked_s

    async def drained(self) -> None:
        """Wait until every queued step is committed (or a conflict wants the loop's attention)."""
        async with self._moved:
            await self._moved.wait_for(lambda: not self._waiting or self.conflict)

    def take_conflict(self) -> tuple[FinishedStep, ...]:
        """The failed step and all behind it; the committer goes on with what comes next."""
        steps = tuple(self._waiting)
        self._waiting.clear()
        self.conflict = False
        return steps

    async def run(self) -> None:
        """Commit for ever; raises FencedError when another process writes this head."""
        while True:
            async with self._moved:
                await self._moved.wait_for(lambda: self._waiting and not self.conflict)
            step = self._waiting[0]
            try:
                await self._make_permanent(step)
            except Conflict:
                async with self._moved:
                    self.conflict = True
                    self._moved.notify_all()
                continue
            async with self._moved:
                self._waiting.popleft()
                self._moved.notify_all()

    async def _make_permanent(self, step: FinishedStep) -> None:
        started = self._ring.clock.monotonic()
        head, upload = await self._prepared(step, self._next_head(step))
        await upload()
        uploaded = self._ring.clock.monotonic()
        try:
            head = await self._writer.commit(head, step.consumed, upload)
        except Conflict:
            if step.published is None or not await self._stands_after_all(head, step):
                raise
        committed = self._ring.clock.monotonic()
        self.version = step.published.version if step.published else self.version
        consumed = self._unlisted | step.consumed
        self._unlisted = {} if step.published else consumed
        await asyncio.gather(*(lease.settle(self._ring) for lease in step.leases))
        self._on_commit(step, head, consumed if step.published else ())
        await self._ring.tell(
            "update_committed",
            version=self.version,
            clock=head.clock.text,
            groups_trained=head.groups_trained,
            groups_dropped=sum(head.groups_dropped.values()),
            upload_s=uploaded - started,
            commit_s=committed - uploaded,
            publish_s=self._ring.clock.monotonic() - started,
        )

    async def _stands_after_all(self, head: Head, step: FinishedStep) -> bool:
        """Remove the upload of a step that was refused: what was never committed must not look like it after
        a loss. Unless ``recover`` was faster and took it for committed: then it is."""

        async def settle() -> bool:
            if await self._writer.adopt(head, step.consumed):
                return True
            await self._store.delete(head.path)
            return False

        return await self._ring.persist(settle, patient=True)

    async def _prepared(self, step: FinishedStep, head: Head) -> tuple[Head, Upload]:
        """The head with the path and the digest of the step's update, if it has one, and what uploads it."""
        published, before = step.published, self._writer.head
        if published is None:
            return head, _nothing
        manifest, files, named = await self._offload(
            lambda: update_entry(
                published,
                head,
                self._ring.identity,
                trained=[candidate.group_id for candidate in step.trained],
                dropped=self._unlisted | step.drops,
                previous=before.path if before is not None else "",
                genesis=self._genesis,
            )
        )
        # Its first upload tells an operator of a store that denies writing; later a step is worth the wait.
        proven = before is not None and before.count > 0

        async def upload() -> None:
            await self._ring.persist(lambda: self._store.publish(manifest, files), patient=proven)

        return named, upload

    def _next_head(self, step: FinishedStep) -> Head:
        learner, published = self._ring.identity.node, step.published
        before = self._writer.head or nothing_committed(self._ring.spec.name, learner)
        drops = dict(before.groups_dropped)
        for drop in step.dropped:
            drops[drop.reason.value] = drops.get(drop.reason.value, 0) + 1
        changes: dict[str, object] = {
            "nonce": self._ring.nonce(),
            "cursor": step.cursor,
            "groups_trained": before.groups_trained + len(step.trained),
            "groups_dropped": drops,
        }
        if published is not None:
            changes |= {
                "count": published.clock[learner],
                "clock": published.clock,
                "weight": published.own_weight,
                # As the bucket will tell it: a head without an upload is lost with the broker's disk.
                "floor": step.floor,
            }
        return before.model_copy(update=changes)


async def _nothing() -> None:
    """There is nothing to upload."""


def nothing_committed(run: str, learner: str) -> Head:
    """The head of a learner before its first update."""
    return Head(
        run=run, learner=learner, count=0, clock=GENESIS, weight=0.0, path="", policy_digest="", nonce=""
    )
