"""An observer at the broker: sees every head at the moment at which it is committed, before anybody else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from safetensors.numpy import load

from node.feed import Feed
from node.memory_store import MemoryBucket
from node.virtual_time import VirtualClock
from protocol.codec import decode_as
from protocol.errors import StoreCorrupt
from protocol.manifest import MANIFEST_NAME, Manifest
from protocol.messages import Head
from protocol.ports import Entry
from roles.policy.compose import UPDATE_FILE, WEIGHTS_FILE, Factors, factors_digest


@dataclass(frozen=True)
class Committed:
    """A committed update, as it lay in the store when its head was written."""

    at: float
    manifest: Manifest
    factors: Factors


class HeadWatch(Feed[Entry]):
    """Keeps what was committed, and notices at once what must never be."""

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__()
        self._bucket = bucket
        self._clock = VirtualClock()
        self.heads: dict[str, Head] = {}
        self.updates: dict[str, Committed] = {}
        """By path."""
        self.broken: list[str] = []
        self._went_back: list[tuple[str, str]] = []
        self.uncertain: set[str] = set()
        """Paths of uploads of which nobody could say, after a loss of the broker's disk, if they were
        committed: their author's head may go back before them."""

    def put(self, item: Entry) -> None:
        """A head was committed."""
        head = decode_as(item.value, Head)
        before = self.heads.get(head.learner)
        self.heads[head.learner] = head
        if before is not None:
            self._compare(before, head)
        if head.path and head.path not in self.updates:
            self._look_at(head)

    def counts_at(self, moment: float) -> dict[str, int]:
        """Count of each learner's head at an earlier moment."""
        counts: dict[str, int] = {}
        for update in self.updates.values():
            if update.at <= moment:
                author = update.manifest.author
                counts[author] = max(counts.get(author, 0), update.manifest.count)
        return counts

    @property
    def faults(self) -> list[str]:
        """What must never be, as far as it is known by now."""
        return self.broken + [text for path, text in self._went_back if path not in self.uncertain]

    def _compare(self, before: Head, head: Head) -> None:
        if head.count < before.count:
            text = f"the head of {head.learner} went back from {before.count} to {head.count}"
            self._went_back.append((before.path, text))
            return
        if head.count > before.count + 1:
            self.broken.append(f"the head of {head.learner} went from {before.count} to {head.count}")
        if not before.clock <= head.clock:
            self.broken.append(f"the clock of {head.learner} went back from {before.clock} to {head.clock}")
        if head.count == before.count and head.path != before.path:
            self.broken.append(f"update {head.count} of {head.learner} was published twice")

    def _look_at(self, head: Head) -> None:
        entry = self._bucket.entries.get(head.path, {})
        try:
            manifest = Manifest.from_json(entry.get(MANIFEST_NAME, b""), head.path)
        except StoreCorrupt:
            self.broken.append(f"update {head.count} of {head.learner} was announced before it could be read")
            return
        self.updates[head.path] = Committed(self._clock.monotonic(), manifest, load(entry[UPDATE_FILE]))
        if (manifest.author, manifest.count) != (head.learner, head.count):
            self.broken.append(f"the head of {head.learner} names another update")


def composed(genesis: Factors, updates: dict[str, Factors]) -> str:
    """Digest of a policy by the definition, without the code that the peers use."""
    total = {name: tensor.astype(np.float32) for name, tensor in genesis.items()}
    for learner in sorted(updates):
        total = {name: tensor + updates[learner][name].astype(np.float32) for name, tensor in total.items()}
    return factors_digest(total)


def genesis_of(bucket: MemoryBucket, run: str) -> Factors:
    """The initial adapter."""
    (path,) = (path for path in bucket.entries if path.startswith(f"{run}/genesis/"))
    return dict(load(bucket.entries[path][WEIGHTS_FILE]))
