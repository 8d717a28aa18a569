"""The committer: makes steps permanent, in order, behind the next step.

    finished step ─▶ upload update, then manifest ─▶ one atomic commit: done.<group>… and head ─▶ acknowledge

Before the commit nothing happened and the groups go to someone else; after it a redelivery finds its
``done`` key. A commit whose outcome is unknown is settled by reading the head back and comparing the
nonce. If a peer consumed one of the groups meanwhile, nothing is stored and the step is rolled back.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from protocol.clock import GENESIS
from protocol.codec import decode_as, encode
from protocol.errors import BusError, DecodeError, FencedError, UnknownOutcome, WrongRevision
from protocol.limits import BATCH_WRITES_MAX, DONE_TTL_S
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head
from protocol.ports import AdapterStore, Offload, Write
from protocol.subjects import Bucket, done_key, head_key
from roles.learner.buffer import Candidate, Dropped
from roles.learner.lease import Lease
from roles.learner.register import Published
from roles.learner.stepper import SafePoint
from roles.policy.compose import UPDATE_FILE
from roles.policy.peft_export import factors_bytes
from roles.policy.policies import PREVIOUS
from roles.ring import RETRY_FIRST_S, RETRY_MAX_S, Ring

TRAINED = b"trained"
STEPS_WAITING_MAX = 3
"""Finished steps that may wait for their commit before the next step is held up."""

GROUPS_MAX = BATCH_WRITES_MAX - 1
"""Groups of one commit; the head is its last write."""


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

    @property
    def leases(self) -> list[Lease]:
        """Everything to acknowledge once this is committed."""
        return [c.lease for c in self.trained] + [d.lease for d in self.dropped]

    @property
    def group_ids(self) -> list[str]:
        """Every group this step consumes."""
        return [c.group_id for c in self.trained] + [d.group_id for d in self.dropped]


class Conflict(Exception):
    """A peer consumed a group of this step first; nothing was stored."""


class Committer:
    """One learner's way to permanence."""

    def __init__(
        self,
        ring: Ring,
        store: AdapterStore,
        offload: Offload,
        on_commit: Callable[[FinishedStep, Head], None],
    ) -> None:
        """``on_commit`` is called after each commit, once the groups are acknowledged."""
        self._ring = ring
        self._store = store
        self._offload = offload
        self._on_commit = on_commit
        self._waiting: deque[FinishedStep] = deque()
        self._moved = asyncio.Condition()
        self.head: Head | None = None
        self.revision = 0
        self.version = 0.0
        """Of the newest committed policy."""
        self.conflict = False
        """The oldest waiting step cannot be committed; the loop must roll back."""

    def resume(self, head: Head | None, revision: int) -> Head:
        """Go on from this learner's own last head; returns it, or the head of a learner without any."""
        self.head, self.revision = head, revision
        return head or nothing_committed(self._ring.spec.name, self._ring.identity.node)

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
        path = await self._upload(step) if step.published else ""
        uploaded = self._ring.clock.monotonic()
        head = self._next_head(step, path)
        await self._commit(step, head)
        committed = self._ring.clock.monotonic()
        self.version = step.published.version if step.published else self.version
        await asyncio.gather(*(lease.settle(self._ring) for lease in step.leases))
        self._on_commit(step, head)
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

    async def _upload(self, step: FinishedStep) -> str:
        assert step.published is not None
        published, learner, run = step.published, self._ring.identity.node, self._ring.spec.name
        count = published.clock[learner]
        previous = self.head.path if self.head is not None else ""

        def describe() -> tuple[Manifest, dict[str, bytes]]:
            files = {UPDATE_FILE: factors_bytes(published.update)}
            manifest = Manifest(
                path=f"{run}/updates/{learner}/{count}",
                kind=EntryKind.UPDATE,
                run=run,
                author=learner,
                clock=published.clock,
                count=count,
                weight=published.own_weight,
                policy_digest=published.digest,
                groups=tuple(c.group_id for c in step.trained),
                dropped={d.group_id: d.reason.value for d in step.dropped},
                extra={PREVIOUS: previous} if previous else {},
                files=Manifest.describe(files),
            )
            # Of everything it says: a step that is repeated after a crash may have other drops.
            digest = hashlib.sha256(manifest.canonical()).hexdigest()[:12]
            named = manifest.model_copy(update={"path": f"{manifest.path}-{digest}"})
            return named.signed(self._ring.identity), files

        manifest, files = await self._offload(describe)
        await self._ring.persist(lambda: self._store.publish(manifest, files))
        return manifest.path

    def _next_head(self, step: FinishedStep, path: str) -> Head:
        learner, published = self._ring.identity.node, step.published
        before = self.head or nothing_committed(self._ring.spec.name, learner)
        drops = dict(before.groups_dropped)
        for drop in step.dropped:
            drops[drop.reason.value] = drops.get(drop.reason.value, 0) + 1
        changes: dict[str, object] = {
            "nonce": secrets.token_hex(8),
            "cursor": step.cursor,
            "groups_trained": before.groups_trained + len(step.trained),
            "groups_dropped": drops,
        }
        if published is not None:
            changes |= {
                "count": published.clock[learner],
                "clock": published.clock,
                "weight": published.own_weight,
                "path": path,
                "policy_digest": published.digest,
            }
        return before.model_copy(update=changes)

    async def _commit(self, step: FinishedStep, head: Head) -> None:
        writes = [Write(done_key(c.group_id), TRAINED, expected=0, ttl_s=DONE_TTL_S) for c in step.trained]
        writes += [
            Write(done_key(d.group_id), d.reason.value.encode(), expected=0, ttl_s=DONE_TTL_S)
            for d in step.dropped
        ]
        key = head_key(self._ring.identity.node)
        writes.append(Write(key, encode(head, self._ring.identity), expected=self.revision))
        wait_s = RETRY_FIRST_S
        while True:
            try:
                self.revision = await self._ring.bus.commit(Bucket.POLICY, writes)
            except (WrongRevision, UnknownOutcome) as exc:
                if await self._landed(head):
                    break
                if isinstance(exc, WrongRevision):
                    raise Conflict from exc
            except BusError as exc:
                self._ring.log.warning("commit_retried", error=str(exc) or type(exc).__name__, wait_s=wait_s)
            else:
                break
            await self._ring.pause(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)
        self.head = head

    async def _landed(self, head: Head) -> bool:
        """Whether ``head`` is stored; raises FencedError if somebody else's is."""
        key = head_key(head.learner)
        entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.POLICY, key))
        if entry is None or entry.revision == self.revision:
            return False
        try:
            nonce = decode_as(entry.value, Head).nonce
        except DecodeError:
            nonce = ""  # not even a head: somebody else's all the same
        if nonce != head.nonce:
            raise fenced(head.learner)
        self.revision = entry.revision
        return True


def fenced(learner: str) -> FencedError:
    """What to tell the person who started the same learner twice."""
    return FencedError(
        f"another process trains as learner {learner!r}; stop one of them or start this one "
        f"under another --name"
    )


def nothing_committed(run: str, learner: str) -> Head:
    """The head of a learner before its first update."""
    return Head(
        run=run, learner=learner, count=0, clock=GENESIS, weight=0.0, path="", policy_digest="", nonce=""
    )
