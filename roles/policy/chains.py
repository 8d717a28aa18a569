"""What a bucket tells of the past: which updates were committed, from their manifests alone (pure).

An upload that was never committed looks like any other. What names it tells them apart: the author's
next update names its predecessor, and a peer's update names what it had merged.

    update 1 ◀─ update 2 ◀─ update 3      nobody names the newest one yet: it is a *tip*
                         ◀─ update 3'     an upload whose commit failed: a peer's update has one of its groups

A tip is taken for committed unless it contradicts another update: its author, if it lives, finds that out by
the nonce of its head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.manifest import EntryKind, Manifest

TRAINED = "trained"
"""Outcome of a trained group; a dropped one's is the reason."""

UNCERTAIN = "uncertain"
"""Outcome of a group after a loss of the broker's disk: an upload that may have been committed lists it. Only
the upload's author, if it knows, says more; nobody trains on it again."""

PREVIOUS = "previous"
"""Key in an update's manifest: the path of its author's update before this one, which was committed too."""


@dataclass
class Chains:
    """Committed updates by learner, oldest first, and what could not be told."""

    updates: dict[str, list[Manifest]] = field(default_factory=dict)
    uncertain: list[Manifest] = field(default_factory=list)
    """Uploads that may have been committed: they contradict each other, so none was taken."""

    @property
    def tips(self) -> dict[str, str]:
        """Path of each learner's newest committed update."""
        return {learner: manifests[-1].path for learner, manifests in self.updates.items() if manifests}

    @property
    def consumed(self) -> dict[str, tuple[str, Manifest]]:
        """Outcome of every group and the update that lists it."""
        found: dict[str, tuple[str, Manifest]] = {}
        for manifests in self.updates.values():
            for manifest in manifests:
                found |= {group: (outcome, manifest) for group, outcome in outcomes(manifest).items()}
        return found


def outcomes(manifest: Manifest) -> dict[str, str]:
    """What became of every group that an update consumed."""
    return dict.fromkeys(manifest.groups, TRAINED) | manifest.dropped


def committed_chains(manifests: Iterable[Manifest]) -> Chains:
    """Every learner's committed updates, as far back as the manifests reach.

    A learner's oldest update binds its name to a key: what other keys signed is not looked at.
    """
    by_author: dict[str, dict[str, Manifest]] = defaultdict(dict)
    for manifest in manifests:
        if manifest.kind is EntryKind.UPDATE:
            by_author[manifest.author][manifest.path] = manifest
    updates = {author: _of_one_key(found) for author, found in sorted(by_author.items())}
    everything = {path: manifest for found in updates.values() for path, manifest in found.items()}
    tips = {author: _tips(found.values()) for author, found in updates.items()}
    before = {author: max(_previous(tip) for tip in found) for author, found in tips.items()}
    certain = _walk(everything, before.values())
    possible = {author: _possible(found, certain) for author, found in tips.items()}
    chains = Chains()
    for author, candidates in possible.items():
        rivals = [tip for other, found in possible.items() if other != author for tip in found]
        sure = [tip for tip in candidates if not _contradicted(tip, candidates, rivals, everything.values())]
        chains.uncertain += [tip for tip in candidates if tip not in sure]
        chains.updates[author] = _walk(everything, [sure[0].path if sure else before[author]])
    return chains


def chains_up_to(
    manifests: Iterable[Manifest], tips: Mapping[str, str], uncertain: Collection[str]
) -> Chains:
    """The same from what was found before: the chains that end in ``tips``, whatever was uploaded since."""
    everything = {m.path: m for m in manifests if m.kind is EntryKind.UPDATE}
    return Chains(
        {learner: _walk(everything, [tip]) for learner, tip in tips.items()},
        [everything[path] for path in uncertain if path in everything],
    )


def _of_one_key(found: Mapping[str, Manifest]) -> dict[str, Manifest]:
    key = min(found.values(), key=lambda manifest: (manifest.count, manifest.path)).signer
    return {path: manifest for path, manifest in found.items() if manifest.signer == key}


def _tips(found: Collection[Manifest]) -> list[Manifest]:
    """Uploads of the highest count."""
    highest = max(manifest.count for manifest in found)
    return sorted((m for m in found if m.count == highest), key=lambda manifest: manifest.path)


def _previous(manifest: Manifest) -> str:
    return manifest.extra.get(PREVIOUS, "")


def _walk(everything: Mapping[str, Manifest], starts: Iterable[str]) -> list[Manifest]:
    """The chains that end in ``starts``, oldest first."""
    found: dict[str, Manifest] = {}
    for start in starts:
        path = start
        while path in everything and path not in found:
            found[path] = everything[path]
            path = _previous(everything[path])
    return sorted(found.values(), key=lambda manifest: (manifest.author, manifest.count))


def _possible(tips: Sequence[Manifest], certain: Iterable[Manifest]) -> list[Manifest]:
    """Tips that share no group with what was committed for certain."""
    taken = {group for manifest in certain for group in outcomes(manifest)}
    return [tip for tip in tips if not taken & outcomes(tip).keys()]


def _contradicted(
    tip: Manifest, siblings: Sequence[Manifest], rivals: Sequence[Manifest], everything: Iterable[Manifest]
) -> bool:
    """Whether another upload that may have been committed excludes this one, and no peer has merged it."""
    groups = outcomes(tip).keys()
    others = [other for other in siblings if other is not tip]
    others += [other for other in rivals if groups & outcomes(other).keys()]
    return bool(others) and not _merged(tip, siblings, everything)


def _merged(tip: Manifest, siblings: Sequence[Manifest], everything: Iterable[Manifest]) -> bool:
    """Whether a peer's update contains the count of this tip, and it is the only one of that count."""
    if len(siblings) > 1:
        return False
    return any(m.clock[tip.author] >= tip.count for m in everything if m.author != tip.author)
