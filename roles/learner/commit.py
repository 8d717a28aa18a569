"""The commit: ``done.<group>`` keys and the head in one atomic batch, and how an unclear outcome is settled.

| the broker says | the head there                | so                                                    |
|-----------------|-------------------------------|-------------------------------------------------------|
| stored          |                               | it happened                                           |
| unknown, or no  | carries this commit's nonce   | it happened                                           |
| unknown         | is the one before             | try again: nothing of it was stored                   |
| no              | is the one before             | a peer consumed one of the groups: ``Conflict``       |
| unknown, or no  | is one of our older ones      | restored from the bucket: say what is missing, again  |
| unknown, or no  | is gone                       | the broker lost its disk: wait for ``recover``        |
| unknown, or no  | is somebody else's            | ``FencedError``                                       |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from protocol.codec import decode_as, encode
from protocol.errors import BusError, DecodeError, FencedError, UnknownOutcome, WrongRevision
from protocol.limits import DONE_TTL_S
from protocol.messages import Head
from protocol.ports import Bus, Entry, Write
from protocol.subjects import GENESIS_KEY, Bucket, done_key, head_key
from roles.policy.chains import TRAINED
from roles.ring import RETRY_FIRST_S, RETRY_MAX_S, Ring

REMEMBERED = 64
"""Commits that can be said again to a broker that was restored from the bucket: it is behind by those
since the newest upload."""

Consumed = Mapping[str, str]
"""Groups of one commit: the outcome by group id."""


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
        self.head: Head | None = None
        self.revision = 0

    def resume(self, resumed: Resumed) -> None:
        """Go on from a head that an earlier process of this learner committed."""
        self.head, self.revision = resumed.head, resumed.revision
        if resumed.head is not None:
            uploaded = resumed.head.model_copy(update={"nonce": resumed.uploaded_nonce})
            self._said += [_Said(uploaded, {}), _Said(resumed.head, resumed.unlisted)]

    async def commit(self, head: Head, consumed: Consumed) -> Head:
        """Write all or nothing, however long that takes; returns the head as it was stored.

        Raises Conflict if a peer consumed a group of it, FencedError if another process writes this head.
        """
        await self._until_the_run_is_there()
        wait_s = RETRY_FIRST_S
        while True:
            writes = [*_done(head, consumed), self._write(head)]
            try:
                self.revision = await self._ring.bus.commit(Bucket.POLICY, writes)
                break
            except (WrongRevision, UnknownOutcome) as exc:
                entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.POLICY, self._key))
                if self._is_ours(entry, head.nonce):
                    assert entry is not None
                    self.revision = entry.revision
                    break
                if self._is_as_it_was(entry):
                    if isinstance(exc, WrongRevision):
                        raise Conflict from exc
                elif entry is not None:
                    head = await self._say_again(entry, head)
            except BusError as exc:
                self._ring.log.warning("commit_retried", error=str(exc) or type(exc).__name__, wait_s=wait_s)
            await self._ring.pause(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)
        self.head = head
        self._said.append(_Said(head, dict(consumed)))
        return head

    async def _until_the_run_is_there(self) -> None:
        """A first head expects nothing, so it must not reach a broker that is only being restored."""
        while self.head is None and not await self._ring.persist(self._genesis_is_claimed):
            await self._ring.pause(RETRY_MAX_S)

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

    async def _say_again(self, entry: Entry, head: Head) -> Head:
        """The broker has an older head of ours: it was restored from the bucket. Commit again what it does
        not know; returns ``head`` without the groups that others have consumed meanwhile."""
        nonces = [said.head.nonce for said in self._said]
        found = _nonce(entry)
        if found not in nonces or self.head is None:
            raise fenced(self._ring.identity.node)
        missing = list(self._said)[nonces.index(found) + 1 :]
        groups = {group: outcome for said in missing for group, outcome in said.consumed.items()}
        taken = {group: outcome for group, outcome in groups.items() if await self._is_done(group)}
        self.head, head = without(self.head, taken), without(head, taken)
        self.revision = entry.revision
        if missing:
            writes = [write for said in missing for write in _done(said.head, said.consumed, taken)]
            try:
                self.revision = await self._ring.bus.commit(Bucket.POLICY, [*writes, self._write(self.head)])
            except BusError as exc:  # what stands there now is looked at again
                self._ring.log.warning("commit_retried", error=str(exc) or type(exc).__name__)
                return head
        await self._ring.tell("head_restored", count=self.head.count, groups_said_again=len(groups))
        return head

    async def _is_done(self, group: str) -> bool:
        return await self._ring.persist(lambda: is_done(self._ring.bus, group))


async def is_done(bus: Bus, group_id: str) -> bool:
    """Whether somebody consumed a group. Raises BusError."""
    return await bus.get(Bucket.POLICY, done_key(group_id)) is not None


def done_write(group_id: str, outcome: str, learner: str, count: int, expected: int | None = None) -> Write:
    """Mark a group as consumed; ``expected`` 0: by nobody before."""
    return Write(done_key(group_id), done_value(outcome, learner, count), expected, DONE_TTL_S)


def done_value(outcome: str, learner: str, count: int) -> bytes:
    """Value of a group's ``done`` key: what became of it, by whom, and after how many of its updates."""
    return f"{outcome} {learner}:{count}".encode()


def outcome_of(value: bytes) -> str:
    """The outcome in a ``done`` key's value."""
    return value.decode(errors="replace").partition(" ")[0]


def _done(head: Head, consumed: Consumed, besides: Collection[str] = ()) -> list[Write]:
    return [
        done_write(group, outcome, head.learner, head.count, expected=0)
        for group, outcome in consumed.items()
        if group not in besides
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
