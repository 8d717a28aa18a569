"""Updates and policies by clock: fetch, verify, compose. The only way from a clock to weights."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from protocol.clock import GENESIS, VectorClock
from protocol.codec import decode
from protocol.errors import DecodeError, StoreCorrupt, StoreNotFound
from protocol.learner_spec import UpdateDtype
from protocol.limits import LEARNERS_MAX
from protocol.manifest import Manifest
from protocol.messages import Head
from protocol.ports import AdapterStore, Entry, Offload
from protocol.subjects import GENESIS_KEY, HEADS, Bucket, head_key
from roles.policy.chains import PREVIOUS
from roles.policy.compose import (
    UPDATE_FILE,
    WEIGHTS_FILE,
    Factors,
    compose,
    factors_digest,
    fault,
    policy_name,
    version_of,
)
from roles.policy.norm_bound import Step, lie, out_of_proportion
from roles.policy.peft_export import read_factors
from roles.policy.update_index import UpdateIndex
from roles.policy.update_paths import named_update
from roles.ring import Ring

T = TypeVar("T")

GENESIS_POLL_S = 0.25
WARNINGS_MAX = 4 * LEARNERS_MAX
"""Warnings about heads; a stranger may invent any number of learners."""

UPDATES_CACHED = 16
"""Updates kept in memory; pinned evaluation may ask for a recent clock again."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A policy with its names: by clock, by version (summed weights), and for the engine."""

    clock: VectorClock
    version: float
    digest: str
    factors: Factors

    @property
    def name(self) -> str:
        """Engine-side name, never reused for other weights."""
        return policy_name(self.clock, self.digest)


@dataclass(frozen=True, slots=True)
class Update:
    """A verified update: one learner's cumulative change and the manifest that describes it."""

    manifest: Manifest
    factors: Factors


class Policies:
    """What one peer knows of heads, updates and policies.

    A learner's first head binds its name to the key that signed it (trust on first use): heads and updates
    of that learner by any other key are not used.
    """

    def __init__(self, ring: Ring, store: AdapterStore, offload: Offload) -> None:
        """Nothing is read until ``start``."""
        self._ring = ring
        self._store = store
        self._offload = offload
        self._index = UpdateIndex(ring.spec.name, store)
        self._updates: OrderedDict[str, Update] = OrderedDict()
        """By path: what lies under one never changes."""
        self._warned: set[tuple[str, str]] = set()
        self._own = ring.identity.node
        self._revisions: dict[str, int] = {}
        self._highest: dict[str, Head] = {}
        self.heads: dict[str, Head] = {}
        """Newest head of each learner, as the broker has them."""
        self.heard_at: float | None = None
        """When the last newer head was heard of, by the ring's clock."""
        self.genesis: Factors = {}
        self.genesis_digest = ""
        self.genesis_author = ""

    async def start(self) -> None:
        """Wait until genesis is claimed and load it. Raises StoreError if it is unusable."""
        path, _, digest = (await self._claim()).partition(" ")
        directory = await self._ring.insist(lambda: self._store.fetch(path))
        self.genesis_author = (await self._ring.insist(lambda: self._store.manifest(path))).author
        self.genesis = await self._offload(lambda: _read(directory / WEIGHTS_FILE))
        self.genesis_digest = factors_digest(self.genesis)
        if self.genesis_digest != digest:
            raise StoreCorrupt(f"{path}: genesis is not the one the run claimed")

    async def read_heads(self) -> VectorClock:
        """Read all heads from the broker; returns their join. Raises BusError."""
        entries = await self._ring.bus.list(Bucket.POLICY, HEADS)
        for entry in entries.values():
            self.note(entry)
        known = self.heads.items()
        gone = [head for name, head in known if head_key(name) not in entries and name != self._own]
        if gone and await self._ring.bus.get(Bucket.RUN, GENESIS_KEY) is not None:
            # The broker was restored without them.
            self.heads = {name: head for name, head in self.heads.items() if head not in gone}
        return self.newest

    async def listen(self, wake: asyncio.Event) -> None:
        """Note every announced head and set ``wake``, for ever; cancel to stop."""
        async for entry in self._ring.bus.announcements():
            self.note(entry)
            wake.set()

    @property
    def newest(self) -> VectorClock:
        """The join of all heads seen."""
        return VectorClock.of({learner: head.count for learner, head in self.heads.items()})

    def note(self, entry: Entry) -> None:
        """Remember a head; an older one than known only tells where its update lies."""
        try:
            signed = decode(entry.value)
            head = signed.expect(Head)
        except DecodeError as exc:
            self._ring.log.warning("head_unreadable", key=entry.key, error=str(exc))
            return
        if (head.run, head_key(head.learner)) != (self._ring.spec.name, entry.key):
            self._ring.log.warning("head_misplaced", key=entry.key, learner=head.learner, run=head.run)
            return
        if self._is_its_learners(head, signed.signer):
            self.note_head(head, signed.signer, entry.revision)

    def note_head(self, head: Head, signer: str = "", revision: int = 0) -> None:
        """Remember a decoded head that is known to be its learner's; the first ``signer`` stays its key.

        The broker's newest word counts: a head goes back when the broker was restored without the last one.
        """
        self._index.note(head, signer)
        known, known_at = self.heads.get(head.learner), self._revisions.get(head.learner, 0)
        if known is None or (revision, head.count) >= (known_at, known.count):
            self.heads[head.learner], self._revisions[head.learner] = head, revision
        highest = self._highest.get(head.learner)
        if highest is None or head.count > highest.count:
            self._highest[head.learner] = head
            self.heard_at = self._ring.clock.monotonic()

    @property
    def lost(self) -> list[Head]:
        """Heads that this peer saw committed and that the broker no longer has, the highest of each peer."""
        counts = {learner: head.count for learner, head in self.heads.items()}
        return [
            head
            for learner, head in self._highest.items()
            if learner != self._own and head.count > counts.get(learner, 0)
        ]

    def _is_its_learners(self, head: Head, signer: str) -> bool:
        """Whether to believe a head."""
        learner = head.learner
        if learner not in self.heads and len(self.heads) >= LEARNERS_MAX:
            self._warn("head_of_one_learner_too_many", learner)
            return False
        if self._index.keys.get(learner, signer) != signer:
            self._warn("head_of_another_key", learner)
            # Under our own name it must not go unseen: so a learner finds out that somebody else is it.
            return learner == self._own
        return True

    def _warn(self, event: str, learner: str) -> None:
        """Say it once; heads are read again and again."""
        if (event, learner) not in self._warned and len(self._warned) < WARNINGS_MAX:
            self._warned.add((event, learner))
            self._ring.log.warning(event, learner=learner)

    async def at(self, clock: VectorClock) -> PolicyVersion:
        """The policy of exactly ``clock``. Raises StoreError if an update cannot be had or verified."""
        if clock == GENESIS:
            return PolicyVersion(GENESIS, 0.0, self.genesis_digest, self.genesis)
        updates = {learner: await self.update(learner, count) for learner, count in clock}
        return await self._compose(clock, updates)

    async def version(self, clock: VectorClock) -> float:
        """Summed weights of all updates in ``clock``. Raises StoreNotFound for an update nobody published."""
        return version_of([await self._index.weight(learner, count) for learner, count in clock])

    async def _compose(self, clock: VectorClock, updates: dict[str, Update]) -> PolicyVersion:
        def work() -> tuple[Factors, str]:
            factors = compose(self.genesis, {k: u.factors for k, u in updates.items()})
            return factors, factors_digest(factors)

        factors, digest = await self._offload(work)
        for update in updates.values():
            if update.manifest.clock == clock and update.manifest.policy_digest != digest:
                raise StoreCorrupt(
                    f"{update.manifest.path}: composing {clock} gives another digest than its author's"
                )
        return PolicyVersion(clock, await self.version(clock), digest, factors)

    def forget(self) -> None:
        """Read every update anew from the store when it is asked for next."""
        self._updates.clear()

    async def update(self, learner: str, count: int) -> Update:
        """One learner's cumulative update, verified. Raises StoreError if it cannot be had."""
        path = await self._index.path(learner, count)
        if held := self._updates.get(path):
            self._index.checked(held.manifest, learner, count)
            return held
        update = await self._read_update(path, learner, count)
        if reason := fault(update.factors, self.genesis) or await self._disproportion(update):
            raise StoreCorrupt(f"{path}: {reason}")
        self._updates[path] = update
        while len(self._updates) > UPDATES_CACHED:
            self._updates.popitem(last=False)
        return update

    async def _read_update(self, path: str, learner: str, count: int) -> Update:
        directory = await self._store.fetch(path)
        manifest = self._index.checked(await self._store.manifest(path), learner, count)
        dtype = self._ring.spec.learner.update_dtype
        return Update(manifest, await self._offload(lambda: _read(directory / UPDATE_FILE, dtype)))

    async def _disproportion(self, update: Update) -> str | None:
        """Why the norm bound refuses an update. Everybody comes to the same verdict: it follows from the
        update, the one before it, and what the manifests of its clock record."""
        settings, manifest = self._ring.spec.learner, update.manifest
        if not settings.step_norm_max:
            return None
        steps = await self._peers_steps(manifest)
        before = await self._before(manifest) if steps else None
        held = (before.manifest, before.factors) if before else None
        reason = await self._offload(lambda: lie(manifest, update.factors, held))
        return reason or out_of_proportion(Step.of(manifest), steps, settings)

    async def _before(self, manifest: Manifest) -> Update | None:
        """The author's update before this one; None if there is none, or nobody keeps it any more."""
        path = manifest.extra.get(PREVIOUS, "")
        if named_update(path) != (manifest.author, manifest.count - 1):
            return None
        try:
            before = self._updates.get(path) or await self._read_update(
                path, manifest.author, manifest.count - 1
            )
        except (StoreNotFound, StoreCorrupt):
            return None
        return None if fault(before.factors, self.genesis) else before

    async def _peers_steps(self, manifest: Manifest) -> list[Step]:
        """What the updates of other learners in an update's clock record of their steps; nothing if one of
        them is not kept any more. A verdict from a part of them could be another one than that of the peers
        that read this update in time, and its author published it by the whole."""
        steps = []
        for learner, count in manifest.clock:
            if learner != manifest.author:
                try:
                    steps.append(await self._index.step(learner, count))
                except StoreNotFound:
                    if self.newest[learner] <= count:
                        raise  # not there yet
                    return []
        return steps

    async def _claim(self) -> str:
        while True:
            entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.RUN, GENESIS_KEY))
            if entry is not None:
                return entry.value.decode()
            await self._ring.clock.sleep(GENESIS_POLL_S)


def _read(path: Path, dtype: UpdateDtype = "float32") -> Factors:
    """Read factors. Raises StoreCorrupt if the file is not there, not one, or of another dtype."""
    if not path.is_file():
        raise StoreCorrupt(f"{path.name} is missing")
    return read_factors(path, dtype)
