"""The janitor: deletes from the store what retention gives free, a learner its own entries only.

It works from memory and presence, so that no listing of the store is needed while a run goes on, and it
forgets nothing that it could not delete: a store that refuses is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from protocol.clock import VectorClock
from protocol.errors import StoreCorrupt, StoreError, StoreNotFound
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head, NodeState
from protocol.ports import AdapterStore
from roles.learner.checkpoint import saved_counts, state_path
from roles.learner.retention import Needs, Stored, expendable
from roles.policy.chains import outcomes
from roles.policy.update_paths import counts_by_path, updates_of
from roles.ring import Ring

CLEAN_MIN_S = 1.0
CLEAN_MAX_S = 30.0
"""How often the janitor looks around: as often as the grace period, within these bounds."""


class Janitor:
    """One learner's housekeeping of the store."""

    def __init__(
        self,
        ring: Ring,
        store: AdapterStore,
        peers: Callable[[], Sequence[NodeState] | None],
        heads: Callable[[], Collection[Head]],
    ) -> None:
        """``peers`` gives the presence of every live node, or None while it cannot be read; ``heads`` every
        learner's newest head, of dead ones too."""
        self._ring = ring
        self._store = store
        self._peers = peers
        self._heads = heads
        self._updates: list[Stored] = []
        self._others: dict[str, list[tuple[str, float]]] = {"state": [], "export": []}

    async def begin(self) -> None:
        """Find what earlier processes of this learner left. Raises nothing: what cannot be read stays."""
        learner, run = self._ring.identity.node, self._ring.spec.name
        known = {stored.path for stored in self._updates}
        try:
            for path, count in counts_by_path(await self._store.list(updates_of(run, learner))).items():
                if path not in known and (update := await self._own(path, count)):
                    self.committed(path, count, update.weight, outcomes(update))
            states = await self._store.list(f"{run}/state/{learner}")
            for count in saved_counts(states, self._ring.spec, learner):
                self.kept("state", state_path(self._ring.spec, learner, count))
        except StoreError as exc:
            self._ring.log.warning("store_unread", error=str(exc))

    async def _own(self, path: str, count: int) -> Manifest | None:
        """The manifest of an update of this learner; None for what only has the name of one, or is broken."""
        try:
            update = await self._store.manifest(path)
        except (StoreCorrupt, StoreNotFound) as exc:
            self._ring.log.warning("entry_skipped", path=path, error=str(exc))
            return None
        found = (update.kind, update.author, update.count, update.signer)
        ours = (EntryKind.UPDATE, self._ring.identity.node, count, self._ring.identity.public_key)
        return update if found == ours else None

    def committed(self, path: str, count: int, weight: float, groups: Iterable[str]) -> None:
        """An update of this learner, with everything it consumed, is in the store."""
        now = self._ring.clock.monotonic()
        self._updates.append(Stored(path, count, weight, tuple(groups), now))
        self._updates.sort(key=lambda stored: stored.count)

    def kept(self, what: str, path: str) -> None:
        """A state or an export of this learner was stored."""
        self._others[what].append((path, self._ring.clock.monotonic()))

    async def run(self) -> None:
        """Clean up for ever; cancel to stop."""
        await self.begin()
        pause_s = min(max(self._ring.spec.store.grace_s, CLEAN_MIN_S), CLEAN_MAX_S)
        while True:
            await self._ring.clock.sleep(pause_s)
            await self.clean()

    async def clean(self) -> None:
        """Delete what nobody can need any more."""
        settings, now = self._ring.spec.store, self._ring.clock.monotonic()
        peers = self._peers()
        if peers is None:
            return
        needs = needs_of(peers, self._heads())
        free = expendable(
            self._updates,
            self._ring.identity.node,
            needs,
            keep=settings.keep_updates,
            grace_s=settings.grace_s,
            max_staleness=self._ring.spec.staleness.max_staleness,
            now=now,
        )
        for stored in free:
            if await self._delete(stored.path):
                self._updates.remove(stored)
        for what, keep in (("state", settings.keep_states), ("export", settings.keep_exports)):
            entries = self._others[what]
            old = entries[:-keep] if keep else []
            for entry in [(path, since) for path, since in old if now - since >= settings.grace_s]:
                if await self._delete(entry[0]):
                    entries.remove(entry)

    async def _delete(self, path: str) -> bool:
        try:
            await self._store.delete(path)
        except StoreError as exc:
            self._ring.log.warning("entry_undeleted", path=path, error=str(exc))
            return False
        self._ring.log.info("entry_deleted", path=path)
        return True


def needs_of(peers: Sequence[NodeState], heads: Collection[Head]) -> Needs:
    """What live peers and all heads say is still needed."""
    named: list[VectorClock] = []
    for peer in peers:
        named += [peer.clock, *peer.needs]
    return Needs(
        named=named,
        learners=[peer.clock for peer in peers if "learner" in peer.roles],
        floors={head.learner: head.floor for head in heads},
    )
