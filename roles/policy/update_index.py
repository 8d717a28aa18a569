"""The index of updates: from a learner and a count to the one manifest that counts, and what it records.

    (learner, count) ─▶ path: a head told it, else the only upload, else back from a later one ─▶ manifest

What was read once is kept, until a head names another path or the learner's key becomes known.
"""

from __future__ import annotations

from protocol.errors import StoreCorrupt, StoreNotFound
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head
from protocol.ports import AdapterStore
from roles.policy.chains import PREVIOUS
from roles.policy.norm_bound import Step
from roles.policy.update_paths import named_update, updates_of


class UpdateIndex:
    """Where updates lie, whose they are, and what their manifests record."""

    def __init__(self, run: str, store: AdapterStore) -> None:
        """Nothing is known yet."""
        self._run = run
        self._store = store
        self._paths: dict[tuple[str, int], str] = {}
        self._weights: dict[tuple[str, int], float] = {}
        self._steps: dict[tuple[str, int], Step] = {}
        self.keys: dict[str, str] = {}
        """The public key that each learner's first head was signed with."""

    def note(self, head: Head, signer: str) -> None:
        """Learn from a head where its update lies; the first ``signer`` stays its learner's key."""
        if signer and head.learner not in self.keys:
            self.keys[head.learner] = signer
            for learner, count in [key for key in self._paths if key[0] == head.learner]:
                self._forget(learner, count)  # found before its key was known
        if head.count:
            if self._paths.get((head.learner, head.count), head.path) != head.path:
                self._forget(head.learner, head.count)  # an upload that was never committed
            self._paths[head.learner, head.count] = head.path
            self._weights[head.learner, head.count] = head.weight

    async def path(self, learner: str, count: int) -> str:
        """Where an update lies. Raises StoreError, StoreNotFound if it is not known to be committed."""
        path = self._paths.get((learner, count))
        if path is None:
            listed = await self._store.list(updates_of(self._run, learner))
            found = [path for path in listed if named_update(path) == (learner, count)]
            if not found:
                raise StoreNotFound(f"update {count} of {learner} is not in the store")
            path = found[0] if len(found) == 1 else await self._committed_path(learner, count)
            self._paths[learner, count] = path
        return path

    async def manifest(self, learner: str, count: int) -> Manifest:
        """An update's manifest. Raises StoreError."""
        return self.checked(await self._store.manifest(await self.path(learner, count)), learner, count)

    async def weight(self, learner: str, count: int) -> float:
        """Summed weights of a learner's updates up to ``count``. Raises StoreError."""
        weight = self._weights.get((learner, count))
        if weight is None:
            weight = self._weights[learner, count] = (await self.manifest(learner, count)).weight
        return weight

    async def step(self, learner: str, count: int) -> Step:
        """What an update's manifest records of its step. Raises StoreError."""
        step = self._steps.get((learner, count))
        if step is None:
            step = self._steps[learner, count] = Step.of(await self.manifest(learner, count))
        return step

    def checked(self, manifest: Manifest, learner: str, count: int) -> Manifest:
        """The manifest, if it is that of this update and signed by its learner; raises StoreCorrupt."""
        claimed = (manifest.kind, manifest.run, manifest.author, manifest.count)
        if claimed != (EntryKind.UPDATE, self._run, learner, count):
            raise StoreCorrupt(f"{manifest.path} is not update {count} of {learner}")
        if self.keys.get(learner, manifest.signer) != manifest.signer:
            raise StoreCorrupt(f"{manifest.path} is signed by another key than the heads of {learner}")
        return manifest

    def _forget(self, learner: str, count: int) -> None:
        """Look an update up again."""
        for known in (self._paths, self._weights, self._steps):
            known.pop((learner, count), None)

    async def _committed_path(self, learner: str, count: int) -> str:
        """Which of several uploads was committed: a learner that crashed before its commit leaves one that
        was not. Walks back from the nearest later update that is known."""
        later = min((n for author, n in self._paths if author == learner and n > count), default=None)
        if later is None:
            raise StoreNotFound(f"update {count} of {learner} is not known to be committed")
        path = ""
        for known in range(later, count, -1):
            manifest = await self.manifest(learner, known)
            if PREVIOUS not in manifest.extra:
                raise StoreNotFound(f"{manifest.path} does not tell which update came before it")
            path = self._paths[learner, known - 1] = manifest.extra[PREVIOUS]
        return path
