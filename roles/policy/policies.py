"""Updates and policies by clock: fetch, verify, compose. The only way from a clock to weights."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from protocol.clock import GENESIS, VectorClock
from protocol.codec import decode
from protocol.errors import DecodeError, StoreCorrupt, StoreNotFound
from protocol.limits import LEARNERS_MAX
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head
from protocol.ports import AdapterStore, Entry, Offload
from protocol.runspec import UpdateDtype
from protocol.subjects import GENESIS_KEY, Bucket, head_key
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
from roles.ring import Ring

T = TypeVar("T")

GENESIS_POLL_S = 0.25
INSIST_TRIES = 5
INSIST_WAIT_S = 1.0
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
        self._updates: OrderedDict[tuple[str, int], Update] = OrderedDict()
        self._weights: dict[tuple[str, int], float] = {}
        self._paths: dict[tuple[str, int], str] = {}
        self._steps: dict[tuple[str, int], Step] = {}
        self._keys: dict[str, str] = {}
        """The public key that each learner's first head was signed with."""
        self._warned: set[tuple[str, str]] = set()
        self.heads: dict[str, Head] = {}
        self.genesis: Factors = {}
        self.genesis_digest = ""
        self.genesis_author = ""

    async def start(self) -> None:
        """Wait until genesis is claimed and load it. Raises StoreError if it is unusable."""
        path, _, digest = (await self._claim()).partition(" ")
        directory = await self.insist(lambda: self._store.fetch(path))
        self.genesis_author = (await self.insist(lambda: self._store.manifest(path))).author
        self.genesis = await self._offload(lambda: _read(directory / WEIGHTS_FILE))
        self.genesis_digest = factors_digest(self.genesis)
        if self.genesis_digest != digest:
            raise StoreCorrupt(f"{path}: genesis is not the one the run claimed")

    async def insist(self, request: Callable[[], Awaitable[T]]) -> T:
        """Ask the store for what must be there: damage on the way, or a listing that lags, passes."""
        for _ in range(INSIST_TRIES - 1):
            try:
                return await self._ring.persist(request)
            except (StoreCorrupt, StoreNotFound) as exc:
                self._ring.log.warning("request_retried", error=str(exc), wait_s=INSIST_WAIT_S)
            await self._ring.pause(INSIST_WAIT_S)
        return await self._ring.persist(request)

    async def read_heads(self) -> VectorClock:
        """Read all heads from the broker; returns their join. Raises BusError."""
        for entry in (await self._ring.bus.list(Bucket.POLICY, "head")).values():
            self.note(entry)
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
            self.note_head(head, signed.signer)

    def note_head(self, head: Head, signer: str = "") -> None:
        """Remember a decoded head that is known to be its learner's; the first ``signer`` stays its key."""
        if signer and head.learner not in self._keys:
            self._keys[head.learner] = signer
            self._forget(head.learner)
        if head.count:
            self._weights[head.learner, head.count] = head.weight
            self._paths[head.learner, head.count] = head.path
        known = self.heads.get(head.learner)
        if known is None or head.count >= known.count:
            self.heads[head.learner] = head

    def _is_its_learners(self, head: Head, signer: str) -> bool:
        """Whether to believe a head."""
        learner = head.learner
        if learner not in self.heads and len(self.heads) >= LEARNERS_MAX:
            self._warn("head_of_one_learner_too_many", learner)
            return False
        if self._keys.get(learner, signer) != signer:
            self._warn("head_of_another_key", learner)
            # Under our own name it must not go unseen: so a learner finds out that somebody else is it.
            return learner == self._ring.identity.node
        return True

    def _warn(self, event: str, learner: str) -> None:
        """Say it once; heads are read again and again."""
        if (event, learner) not in self._warned and len(self._warned) < WARNINGS_MAX:
            self._warned.add((event, learner))
            self._ring.log.warning(event, learner=learner)

    def _forget(self, learner: str) -> None:
        """Look everything of a learner up again: it was found before its key was known."""
        for known in (self._updates, self._weights, self._paths, self._steps):
            for key in [key for key in known if key[0] == learner]:
                known.pop(key)

    async def at(self, clock: VectorClock) -> PolicyVersion:
        """The policy of exactly ``clock``. Raises StoreError if an update cannot be had or verified."""
        if clock == GENESIS:
            return PolicyVersion(GENESIS, 0.0, self.genesis_digest, self.genesis)
        updates = {learner: await self.update(learner, count) for learner, count in clock}
        return await self._compose(clock, updates)

    async def version(self, clock: VectorClock) -> float:
        """Summed weights of all updates in ``clock``. Raises StoreNotFound for an update nobody published."""
        return version_of([await self._weight(learner, count) for learner, count in clock])

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

    async def update(self, learner: str, count: int) -> Update:
        """One learner's cumulative update, verified. Raises StoreError if it cannot be had."""
        key = (learner, count)
        if key not in self._updates:
            path = await self._path(learner, count)
            directory = await self._store.fetch(path)
            manifest = self._checked(await self._store.manifest(path), learner, count)
            dtype = self._ring.spec.learner.update_dtype
            factors = await self._offload(lambda: _read(directory / UPDATE_FILE, dtype))
            if reason := fault(factors, self.genesis) or await self._disproportion(manifest, factors):
                raise StoreCorrupt(f"{path}: {reason}")
            self._updates[key] = Update(manifest, factors)
            while len(self._updates) > UPDATES_CACHED:
                self._updates.popitem(last=False)
        return self._updates[key]

    async def _disproportion(self, manifest: Manifest, factors: Factors) -> str | None:
        """Why the norm bound refuses an update. The verdict is everybody's; only who happens to hold the
        update before finds out that a manifest lies."""
        settings = self._ring.spec.learner
        if not settings.step_norm_max:
            return None
        held = self._updates.get((manifest.author, manifest.count - 1))
        before = (held.manifest, held.factors) if held else None
        reason = await self._offload(lambda: lie(manifest, factors, before))
        return reason or out_of_proportion(Step.of(manifest), await self._peers_steps(manifest), settings)

    async def _peers_steps(self, manifest: Manifest) -> list[Step]:
        """What the updates of other learners in an update's clock record of their steps."""
        keys = [key for key in manifest.clock if key[0] != manifest.author]
        for learner, count in keys:
            if (learner, count) not in self._steps:
                try:
                    self._steps[learner, count] = Step.of(await self._manifest(learner, count))
                except StoreNotFound:
                    if self.newest[learner] <= count:
                        raise
                    # Nobody keeps it any more: whoever read this update in time has judged it.
        return [self._steps[key] for key in keys if key in self._steps]

    async def _weight(self, learner: str, count: int) -> float:
        """Summed weights of a learner's updates up to ``count``."""
        weight = self._weights.get((learner, count))
        if weight is None:
            weight = self._weights[learner, count] = (await self._manifest(learner, count)).weight
        return weight

    async def _manifest(self, learner: str, count: int) -> Manifest:
        return self._checked(await self._store.manifest(await self._path(learner, count)), learner, count)

    def _checked(self, manifest: Manifest, learner: str, count: int) -> Manifest:
        claimed = (manifest.kind, manifest.run, manifest.author, manifest.count)
        if claimed != (EntryKind.UPDATE, self._ring.spec.name, learner, count):
            raise StoreCorrupt(f"{manifest.path} is not update {count} of {learner}")
        if self._keys.get(learner, manifest.signer) != manifest.signer:
            raise StoreCorrupt(f"{manifest.path} is signed by another key than the heads of {learner}")
        return manifest

    async def _path(self, learner: str, count: int) -> str:
        path = self._paths.get((learner, count))
        if path is None:
            prefix = f"{self._ring.spec.name}/updates/{learner}"
            found = [p for p in await self._store.list(prefix) if p.rsplit("/", 1)[1].startswith(f"{count}-")]
            if not found:
                raise StoreNotFound(f"update {count} of {learner} is not in the store")
            path = found[0] if len(found) == 1 else await self._committed_path(learner, count)
            self._paths[learner, count] = path
        return path

    async def _committed_path(self, learner: str, count: int) -> str:
        """Which of several uploads was committed: a learner that crashed before its commit leaves one that
        was not. Walks back from the nearest later update that is known."""
        later = min((n for author, n in self._paths if author == learner and n > count), default=None)
        if later is None:
            raise StoreNotFound(f"update {count} of {learner} is not known to be committed")
        path = ""
        for known in range(later, count, -1):
            manifest = await self._manifest(learner, known)
            if PREVIOUS not in manifest.extra:
                raise StoreNotFound(f"{manifest.path} does not tell which update came before it")
            path = self._paths[learner, known - 1] = manifest.extra[PREVIOUS]
        return path

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
