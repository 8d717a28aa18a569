"""The books of a simulated run: what became of every group, read from broker and bucket alone."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.clock import VectorClock
from protocol.codec import decode, decode_as
from protocol.manifest import MANIFEST_NAME, Manifest
from protocol.messages import DeadLetter, Event, Head
from protocol.subjects import TRAINING, Bucket, cursor_key, head_key
from roles.learner.committer import TRAINED
from roles.policy.policies import PREVIOUS
from tests.sim.swarm import World


@dataclass(frozen=True)
class Books:
    """A run at one moment."""

    issued: set[str]
    trained: set[str]
    dropped: dict[str, str]
    dead: dict[str, str]
    in_flight: set[str]
    head: Head
    updates: list[Manifest]
    """Committed updates, oldest first."""
    events: list[Event]

    def told(self, name: str) -> list[dict[str, object]]:
        """Fields of all events of a name, in order."""
        return [dict(event.fields) for event in self.events if event.name == name]


def read_books(world: World, learner: str = "learner-1") -> Books:
    """Read everything."""
    run = world.broker.run(world.spec.name)
    done = {key.removeprefix("done."): e.value for key, e in run.buckets[Bucket.POLICY].below("done").items()}
    letters = [decode_as(frame, DeadLetter) for frame in run.dead]
    waiting = [m for queue in TRAINING for m in (*run.queues[queue]._waiting, *run.queues[queue]._taken.values())]
    cursor = run.buckets[Bucket.RUN].get(cursor_key(learner))
    stored = run.buckets[Bucket.POLICY].get(head_key(learner))
    assert stored is not None, "nothing was committed"
    head = decode_as(stored.value, Head)
    return Books(
        issued={f"{learner}.{number}" for number in range(int(cursor.value) if cursor else 0)},
        trained={group for group, value in done.items() if value == TRAINED},
        dropped={group: value.decode() for group, value in done.items() if value != TRAINED},
        dead={letter.group_id: letter.detail for letter in letters if letter.group_id},
        in_flight={str(getattr(decode(m.data).message, "group_id", "")) for m in waiting},
        head=head,
        updates=_updates(world, head),
        events=[decode_as(frame, Event) for frame in run.events],
    )


def _updates(world: World, head: Head) -> list[Manifest]:
    """The committed chain, from the head back."""
    chain: list[Manifest] = []
    path = head.path
    while path:
        chain.append(Manifest.from_json(world.bucket.entries[path][MANIFEST_NAME], path))
        path = chain[-1].extra.get(PREVIOUS, "")
    return chain[::-1]


def check_promises(world: World, books: Books) -> None:
    """The promises of one learner's run; raises AssertionError with what was broken."""
    _check_balance(books)
    _check_exactly_once(books)
    _check_staleness(world, books)
    _check_bytes(world, books)


def _check_balance(books: Books) -> None:
    consumed = books.trained | books.dropped.keys() | books.dead.keys()
    assert books.issued - consumed - books.in_flight == set(), "groups vanished"
    assert books.trained & books.dead.keys() == set(), "trained and dead"
    assert books.dropped.keys() & books.dead.keys() == set(), "dropped and dead"
    unissued = consumed - books.issued
    assert unissued == set(), f"groups that nobody issued: {unissued}"
    assert books.head.groups_trained == len(books.trained)
    assert sum(books.head.groups_dropped.values()) == len(books.dropped)


def _check_exactly_once(books: Books) -> None:
    groups = [group for update in books.updates for group in update.groups]
    assert len(groups) == len(set(groups)), "a group changed the policy twice"
    assert set(groups) <= books.trained, "an update trained on a group that was not committed"
    assert [update.count for update in books.updates] == list(range(1, books.head.count + 1))


def _check_staleness(world: World, books: Books) -> None:
    versions = {VectorClock(): 0.0} | {update.clock: update.weight for update in books.updates}
    bound = world.spec.staleness.max_staleness
    for before, update in zip([0.0, *(u.weight for u in books.updates)], books.updates, strict=False):
        for group in update.groups:
            age = min(before - versions[clock] for clock in world.seen.clocks[group])
            assert 0 <= age <= bound, f"{group} was {age} versions old in update {update.count}"
    assert all(0 <= float(str(s["sample/staleness_max"])) <= bound for s in books.told("step_trained"))


def _check_bytes(world: World, books: Books) -> None:
    by_clock = {update.clock.digest[:8]: update.policy_digest for update in books.updates}
    for name, digests in world.seen.digests.items():
        _, clock, digest = name.split("-")
        assert {d[: len(digest)] for d in digests} == {digest}, f"{name} was loaded with other bytes"
        if clock in by_clock:
            assert digests == {by_clock[clock]}, f"{name} is not what its author composed"
