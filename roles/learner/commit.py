"""The commit: ``done.<group>`` keys and the head in one atomic batch, and how an unclear outcome is settled.

| the broker says | the head there                | so                                                    |
|-----------------|-------------------------------|-------------------------------------------------------|
| stored          |                               | it happened                                           |
| unknown, or no  | carries this commit's nonce   | it happened                                           |
| unknown         | is the one before             | try again: nothing of it was stored                   |
| no              | is the one before             | a peer consumed one of the groups: ``Conflict``       |
| no, uncertain   | is the one before             | wait for a peer who saw it, then ``Conflict``         |
| unknown, or no  | is one of our older ones      | restored from the bucket: say what is missing, again  |
| unknown, or no  | is gone, and genesis with it  | the broker lost its disk: wait for ``recover``        |
| unknown, or no  | is gone, genesis is not       | restored without our head: say all of it again        |
| unknown, or no  | is somebody else's            | ``FencedError``                                       |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from protocol.codec import decode_as, encode
from protocol.errors import BusError, DecodeError, FencedError, UnknownOutcome, WrongRevision
from protocol.messages import Head
from protocol.ports import Entry, Write
from protocol.subjects import GENESIS_KEY, Bucket, done_key, head_key
from roles.learner.done import Consumed, done_again, done_value, done_write
from roles.policy.chains import TRAINED, UNCERTAIN
from roles.ring import RETRY_FIRST_S, RETRY_MAX_S, Ring

REMEMBERED = 64
"""Commits that can be said again to a broker that was restored from the bucket: it is behind by those
since the newest upload."""

WITNESS_WAIT_S = 30.0
"""Peers read all heads several times within so long."""


class Conflict(Exception):
    """A peer consumed a group of this commit first; nothing was stored."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A learner's own last head and what belongs to it; no head at the beginning."""

    head: Head | None = None
    revision: int = 0
    uploaded_nonce: str = ""
    """Nonce of the head that lies beside the newest update; another one if it committed drops since."""
    unlisted: Consumed = field(default_factory=dict)
    """Groups it consumed since that upload, with the outcome: no manifest lists them yet."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A commit that happened."""

    head: Head
    consumed: Consumed


class HeadWriter:
    """The only writer of one learner's head."""

    def __init__(self, ring: Ring) -> None:
        """Nothing is committed yet."""
        self._ring = ring
        self._key = head_key(ring.identity.node)
        self._said: deque[_Said] = deque(maxlen=REMEMBERED)
        self._offered: dict[str, _Said] = {}
        """What a restored broker was told again, and which groups others had consumed by then, by nonce."""
        self._began_with_update = False
        self._pending = ""
        """Nonce of the commit whose outcome is not known yet."""
        self.head: Head | None = None
        self.revision = 0

    def resume(self, resumed: Resumed) -> None:
        """Go on from a head that an earlier process of this learner committed."""
        self.head, self.revision = resumed.head, resumed.revision
        if resumed.head is not None:
            self._began_with_update = resumed.head.count > 0
            uploaded = resumed.head.model_copy(update={"nonce": resumed.uploaded_nonce})
            self._said += [_Said(uploaded, {}), _Said(resumed.head, resumed.unlisted)]

    async def commit(
        self, head: Head, consumed: Consumed, upload: Callable[[], Awaitable[None]] | None = None
    ) -> Head:
        """Write all or nothing, however long that takes; returns the head as it was stored.

        ``upload`` stores what the head names, again if need be: a process of this name that the broker has
        forgotten with its disk may have removed it. Raises Conflict if a peer consumed a group of it,
        FencedError if another process writes this head.
        """
        self._pending = head.nonce
        await self._until_the_run_is_there()
        wait_s = RETRY_FIRST_S
        while True:
            writes = [*_done(head, consumed), self._write(head)]
            try:
                self.revision = await self._ring.bus.commit(Bucket.POLICY, writes)
                break
            except (WrongRevision, UnknownOutcome) as exc:
                whole = self.head is not None or await self._ring.persist(self._genesis_is_claimed)
                entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.POLICY, self._key))
                if self._is_ours(entry, head.nonce):
                    assert entry is not None
                    self.revision = entry.revision
                    break
                if self._is_as_it_was(entry):
                    refused = whole and isinstance(exc, WrongRevision)
                    if refused and not await self._is_witnessed(head, consumed):
                        raise Conflict from exc
                elif entry is not None or await self._was_restored_without_us():
                    head = await self._say_again(entry, head)
                    if upload is not None:
                        await upload()
            except BusError as exc:
                self._ring.log.warning("commit_retried", error=str(exc) or type(exc).__name__, wait_s=wait_s)
            await self._ring.pause(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)
        self._happened(head, consumed)
        return head

    async def adopt(self, head: Head, consumed: Consumed) -> bool:
        """Whether a commit that was refused stands all the same: ``recover`` found its upload."""
        entry = await self._ring.bus.get(Bucket.POLICY, self._key)
        if entry is None or not self._is_ours(entry, head.nonce):
            return False
        self.revision = entry.revision
        self._happened(head, consumed)
        return True

    def _happened(self, head: Head, consumed: Consumed) -> None:
        self.head = head
        self._said.append(_Said(head, dict(consumed)))

    async def check_alone(self, seen: Head) -> None:
        """Raises FencedError if ``seen`` was written by another process, and its head still stands."""
        if not self._wrote(seen.nonce):
            await self.check_stands()

    async def check_stands(self) -> None:
        """Raises FencedError if the head that stands was written by another process."""
        entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.POLICY, self._key))
        if entry is not None and not self._wrote(_nonce(entry)):
            raise fenced(self._ring.identity.node)

    def _wrote(self, nonce: str) -> bool:
        known = (said.head.nonce for said in self._said)
        return nonce == self._pending or nonce in self._offered or nonce in known

    async def _is_witnessed(self, head: Head, consumed: Consumed) -> bool:
        """Whether this commit happened before the broker lost its disk: it is marked as uncertain, and a peer
        who saw it says so within ``WITNESS_WAIT_S``."""
        mark = done_value(UNCERTAIN, head.learner, head.count)
        if not any([await self._value(done_key(group)) == mark for group in consumed]):
            return False
        until = self._ring.clock.monotonic() + WITNESS_WAIT_S
        while self._ring.clock.monotonic() < until:
            await self._ring.pause(RETRY_MAX_S)
            entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.POLICY, self._key))
            if self._is_ours(entry, head.nonce):
                return True
        return False

    async def _value(self, key: str) -> bytes | None:
        entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.POLICY, key))
        return entry.value if entry is not None else None

    async def _until_the_run_is_there(self) -> None:
        """A first head expects nothing, so it must not reach a broker that is only being restored."""
        while self.head is None and not await self._ring.persist(self._genesis_is_claimed):
            await self._ring.pause(RETRY_MAX_S)

    @property
    def _knows_all(self) -> bool:
        """Whether every group that was ever consumed under this head can be said again."""
        return not self._began_with_update and len(self._said) < REMEMBERED

    async def _genesis_is_claimed(self) -> bool:
        return await self._ring.bus.get(Bucket.RUN, GENESIS_KEY) is not None

    def _write(self, head: Head) -> Write:
        return Write(self._key, encode(head, self._ring.identity), expected=self.revision)

    def _is_as_it_was(self, entry: Entry | None) -> bool:
        """Whether nobody wrote since: then a refusal was about a group."""
        return (entry.revision if entry is not None else 0) == self.revision

    @staticmethod
    def _is_ours(entry: Entry | None, nonce: str) -> bool:
        return entry is not None and _nonce(entry) == nonce

    async def _was_restored_without_us(self) -> bool:
        """Whether the broker has the run and not our head, though all of it can be said again: the bucket
        has no update of ours that was certainly committed."""
        if not self._knows_all or not await self._ring.persist(self._genesis_is_claimed):
            return False
        return await self._ring.persist(lambda: self._ring.bus.get(Bucket.POLICY, self._key)) is None

    async def _say_again(self, entry: Entry | None, head: Head) -> Head:
        """The broker has an older head of ours, or none: it was restored from the bucket. Commit again what
        it does not know; returns ``head`` without the groups that others have consumed meanwhile."""
        found = _nonce(entry) if entry is not None else ""
        nonces = [said.head.nonce for said in self._said]
        if self.head is None or (entry is not None and found not in (*nonces, *self._offered)):
            raise fenced(self._ring.identity.node)
        revision = entry.revision if entry is not None else 0
        if found in self._offered:  # an earlier try was stored after all
            return await self._restored(revision, self._offered[found], head)
        missing = list(self._said)[nonces.index(found) + 1 if entry is not None else 0 :]
        if not missing:
            self.revision = revision
            return head
        writes, taken = await self._writes_again(missing)
        base = without(self.head, taken).model_copy(update={"nonce": self._ring.nonce()})
        offer = self._offered[base.nonce] = _Said(base, taken)
        try:
            write = Write(self._key, encode(base, self._ring.identity), expected=revision)
            revision = await self._ring.bus.commit(Bucket.POLICY, [*writes, write])
        except BusError as exc:  # what stands there now is looked at again
            self._ring.log.warning("commit_retried", error=str(exc) or type(exc).__name__)
            return head
        return await self._restored(revision, offer, head)

    async def _writes_again(self, missing: Sequence[_Said]) -> tuple[list[Write], Consumed]:
        """What marks the groups of ``missing`` as consumed, and those of them that somebody else has."""
        writes: list[Write] = []
        taken: dict[str, str] = {}
        for said in missing:
            head = said.head
            again = partial(done_again, self._ring.bus, head.learner, head.count, said.consumed)
            found = await self._ring.persist(again)
            writes += found[0]
            taken |= found[1]
        return writes, taken

    async def _restored(self, revision: int, offer: _Said, head: Head) -> Head:
        """The broker knows everything again, but that others ``consumed`` some of it."""
        self._offered.clear()
        self.revision, self.head = revision, offer.head
        self._said.append(_Said(offer.head, {}))
        await self._ring.tell("head_restored", count=offer.head.count, groups_lost=len(offer.consumed))
        return without(head, offer.consumed)


def _done(head: Head, consumed: Consumed) -> list[Write]:
    return [
        done_write(group, outcome, head.learner, head.count, expected=0)
        for group, outcome in consumed.items()
    ]


def _nonce(entry: Entry) -> str:
    try:
        return decode_as(entry.value, Head).nonce
    except DecodeError:
        return ""  # not even a head: somebody else's all the same


def without(head: Head, groups: Consumed) -> Head:
    """``head`` with ``groups`` taken out of its counts (pure)."""
    trained = sum(outcome == TRAINED for outcome in groups.values())
    drops = dict(head.groups_dropped)
    for outcome in groups.values():
        if outcome != TRAINED:
            drops[outcome] -= 1
    return head.model_copy(update={"groups_trained": head.groups_trained - trained, "groups_dropped": drops})


def fenced(learner: str) -> FencedError:
    """What to tell the person who started the same learner twice."""
    return FencedError(
        f"another process trains as learner {learner!r}; stop one of them or start this one "
        f"under another --name"
    )
