"""The books of a simulated run: what became of every group, read from broker and bucket alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from protocol.clock import VectorClock
from protocol.codec import decode_as
from protocol.manifest import Manifest
from protocol.messages import DeadLetter, Event, Head
from protocol.subjects import TRAINING, Bucket
from roles.learner.done import outcome_of
from roles.learner.outstanding import Cursor
from roles.policy.chains import PREVIOUS, TRAINED, UNCERTAIN
from roles.policy.compose import VERSION_ROUNDING
from tests.sim.swarm import World
from tests.sim.watch import composed, genesis_of

IN_FLIGHT_MAX = 200
"""More than any admission bound of these runs."""


@dataclass(frozen=True)
class Books:
    """A run at one moment."""

    issued: set[str]
    issued_unsaid: set[str]
    """What a learner may have issued without saying so: it stopped before it kept its cursor."""
    trained: set[str]
    dropped: dict[str, str]
    dead: dict[str, str]
    """Why a message of a group was buried that ended in no other way."""
    in_flight: set[str]
    heads: dict[str, Head]
    updates: dict[str, list[Manifest]]
    """Committed updates of each learner, oldest first."""
    frames: tuple[bytes, ...]
    """Telemetry."""

    @cached_property
    def events(self) -> list[Event]:
        """Telemetry, decoded."""
        return [decode_as(frame, Event) for frame in self.frames]

    def told(self, name: str) -> list[dict[str, object]]:
        """Fields of all events of a name, in order."""
        return [dict(event.fields) for event in self.events if event.name == name]

    @property
    def counts(self) -> dict[str, int]:
        """Committed updates by learner."""
        return {learner: head.count for learner, head in self.heads.items()}

    def knows(self, clock: VectorClock) -> bool:
        """Whether every update in a clock was committed."""
        return all(count <= len(self.updates.get(learner, ())) for learner, count in clock)

    def version(self, clock: VectorClock) -> float:
        """Summed weights of all updates in a clock."""
        assert self.knows(clock), f"{clock} names updates that were never committed"
        return fsum(self.updates[learner][count - 1].weight for learner, count in clock)


def read_heads(world: World) -> dict[str, Head]:
    """The heads as the broker has them."""
    entries = world.broker.run(world.spec.name).buckets[Bucket.POLICY].below("head")
    heads = [decode_as(entry.value, Head) for entry in entries.values()]
    return {head.learner: head for head in heads}


def read_books(world: World) -> Books:
    """Read everything."""
    run, heads = world.broker.run(world.spec.name), read_heads(world)
    done = {
        key.removeprefix("done."): outcome_of(e.value)
        for key, e in run.buckets[Bucket.POLICY].below("done").items()
    }
    letters = [decode_as(frame, DeadLetter) for frame in run.dead]
    entries = run.buckets[Bucket.RUN].below("cursor")
    cursors = {key.removeprefix("cursor."): Cursor.parse(entry.value).next for key, entry in entries.items()}
    queues = [run.queues[queue] for queue in TRAINING]
    waiting = [message for queue in queues for message in (*queue._waiting, *queue._taken.values())]
    return Books(
        issued={f"{learner}.{number}" for learner, end in cursors.items() for number in range(end)},
        issued_unsaid={
            f"{learner}.{number}"
            for learner in world.learners
            for number in range(cursors.get(learner, 0), cursors.get(learner, 0) + IN_FLIGHT_MAX)
        },
        trained={group for group, value in done.items() if value == TRAINED},
        dropped={group: value for group, value in done.items() if value != TRAINED},
        dead={
            letter.group_id: letter.detail
            for letter in letters
            if letter.queue in TRAINING and letter.group_id and letter.group_id not in done
        },
        in_flight={message.message_id.rpartition(":")[2] for message in waiting},
        heads=heads,
        updates={learner: _chain(world, head) for learner, head in heads.items()},
        frames=tuple(run.events),
    )


def _chain(world: World, head: Head) -> list[Manifest]:
    """A learner's committed updates, from its head back; also those that the store no longer keeps."""
    chain: list[Manifest] = []
    path = head.path
    while path:
        chain.append(world.watch.updates[path].manifest)
        path = chain[-1].extra.get(PREVIOUS, "")
    return chain[::-1]


def check_promises(world: World, books: Books) -> None:
    """What the design promises; raises AssertionError with what was broken."""
    assert world.watch.faults == [], world.watch.faults[0]
    check_balance(world, books)
    check_exactly_once(books)
    check_staleness(world, books)
    check_bytes(world, books)


def check_progress(world: World, books: Books) -> None:
    """What holds at any moment, not only at the end."""
    assert world.watch.faults == [], world.watch.faults[0]
    check_balance(world, books)
    check_exactly_once(books)


def check_balance(world: World, books: Books) -> None:
    """Issued = trained + dropped + dead + in flight, and each group is one of these."""
    trained, dropped, dead = books.trained, books.dropped.keys(), books.dead.keys()
    vanished = books.issued - trained - dropped - dead - books.in_flight - world.forgotten
    assert vanished == set(), f"groups vanished: {', '.join(sorted(vanished))}"
    lost = world.trained_before - trained - dropped
    assert lost == set(), f"trained before the disk was lost, and now unknown: {', '.join(sorted(lost))}"
    ahead = (trained | dropped | dead) - books.issued
    assert ahead <= books.issued_unsaid, f"groups that nobody issued: {ahead - books.issued_unsaid}"
    assert sum(head.groups_trained for head in books.heads.values()) == len(trained)
    committed = [group for group, outcome in books.dropped.items() if outcome != UNCERTAIN]
    assert sum(sum(head.groups_dropped.values()) for head in books.heads.values()) == len(committed)


def check_exactly_once(books: Books) -> None:
    """No group is in two updates, and no count was skipped or repeated."""
    groups = [group for updates in books.updates.values() for update in updates for group in update.groups]
    assert len(groups) == len(set(groups)), "a group changed the policy twice"
    assert set(groups) <= books.trained, "an update trained on a group that was not committed"
    for learner, updates in books.updates.items():
        assert [update.count for update in updates] == list(range(1, books.heads[learner].count + 1))


def check_staleness(world: World, books: Books) -> None:
    """No group was older than the bound when it was trained, by clocks that no learner computed.

    Within an update of several steps peers may have been merged, so a group's age counts from where its
    learner certainly stood: at its update before.
    """
    bound = world.spec.staleness.max_staleness + VERSION_ROUNDING
    assert all(0 <= float(str(told["sample/staleness_max"])) <= bound for told in books.told("step_trained"))
    one_step = world.spec.learner.publish_every == 1
    for learner, updates in books.updates.items():
        for before, update in zip([None, *updates], updates, strict=False):
            if not books.knows(update.clock) and world.watch.uncertain:
                continue  # it stands on an upload that nobody could judge after the disk was lost
            after = VectorClock.of({**dict(update.clock.counts), learner: update.count - 1})
            stood = after if one_step else before.clock if before is not None else VectorClock()
            for group in update.groups:
                clocks = [clock for clock in world.seen.clocks[group] if clock <= after]
                assert clocks, f"{group} had seen updates that its learner had not"
                age = min(books.version(stood) - books.version(clock) for clock in clocks)
                assert age <= bound, f"{group} was {age} versions old in update {update.count} of {learner}"


def check_bytes(world: World, books: Books) -> None:
    """Everybody who held a clock held the same bytes, and those that the definition gives."""
    digests: dict[str, set[str]] = defaultdict(set)
    for name, loaded in world.seen.digests.items():
        _, clock, digest = name.split("-")
        assert {full[: len(digest)] for full in loaded} == {digest}, f"{name} was loaded with other bytes"
        digests[clock] |= loaded
    for updates in books.updates.values():
        for update in updates:
            for clock in [clock for clock in digests if update.clock.digest.startswith(clock)]:
                digests[clock].add(update.policy_digest)
    torn = {clock: found for clock, found in digests.items() if len(found) > 1}
    # An author that died with an upload that nobody could judge uses its number again.
    assert torn == {} or world.watch.uncertain, "the same clock with different bytes"
    if books.updates:
        check_composition(world, books)


def check_composition(world: World, books: Books) -> None:
    """What each author says of its policy's bytes is genesis plus everybody's update, in sorted order."""
    genesis = genesis_of(world.bucket, world.spec.name)
    for updates in books.updates.values():
        for update in updates:
            if not books.knows(update.clock) and world.watch.uncertain:
                continue
            parts = {
                learner: world.watch.updates[books.updates[learner][count - 1].path].factors
                for learner, count in update.clock
            }
            says = f"update {update.count} of {update.author} says other bytes of {update.clock}"
            assert composed(genesis, parts) == update.policy_digest, f"{says}: same clock, different bytes"
