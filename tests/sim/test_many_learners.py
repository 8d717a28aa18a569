"""Several learners on one ring: they consume each group once, hold the same bytes, and end the run once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.virtual_time import in_virtual_time
from protocol.clock import VectorClock
from protocol.codec import decode_as, encode
from protocol.identity import Identity
from protocol.limits import LEARNERS_MAX
from protocol.messages import Head
from protocol.ports import Write
from protocol.subjects import GENESIS_KEY, Bucket, Queue, head_key
from roles.learner.committer import nothing_committed
from roles.policy.chains import TRAINED
from tests.build import a_group, a_task, a_verified_group, an_entry, an_identity
from tests.sim.books import check_exactly_once, check_promises, check_staleness, read_books, read_heads
from tests.sim.swarm import Peer, World, a_small_run


async def finished(*peers: Peer) -> None:
    """All of them end by themselves."""
    await asyncio.gather(*(peer.work for peer in peers))


@pytest.mark.parametrize("publish_every", [1, 2])
@in_virtual_time
async def test_learners_that_begin_at_once_share_the_work_and_end_together(
    tmp_path: Path, publish_every: int
):
    world = World(a_small_run(learner={"publish_every": publish_every}), tmp_path)
    await world.create()
    learners = [world.learner(f"learner-{number}") for number in (1, 2)]
    await finished(*learners, world.sampler("sampler-1"), world.sampler("sampler-2"), world.verifier())
    books = read_books(world)
    check_promises(world, books)
    joined = VectorClock.of(books.counts)
    assert books.version(joined) >= 8
    assert min(books.counts.values()) >= 2, "both contributed"
    assert len(books.told("genesis_claimed")) == len(books.told("run_finished")) == 1
    assert {event["lost"] for event in books.told("evaluated")} == {0}
    assert len({event["clock"] for event in books.told("evaluated")}) == len(books.told("evaluated"))


@in_virtual_time
async def test_a_learner_that_joins_late_begins_where_the_others_are(tmp_path: Path):
    world = World(a_small_run(), tmp_path)
    await world.create()
    peers = [world.learner(), world.sampler("sampler-1"), world.sampler("sampler-2"), world.verifier()]
    while "learner-1" not in (heads := read_heads(world)) or heads["learner-1"].count < 4:
        await world.clock.sleep(0.05)
    await finished(*peers, world.learner("learner-2"))
    books = read_books(world)
    check_promises(world, books)
    for update in books.updates.get("learner-2", []):
        assert update.clock["learner-1"] >= 4
    assert {event["version"] for event in books.told("evaluated")} >= {0.0, 4.0}
    assert len([event for event in books.told("evaluated") if event["version"] == 0.0]) == 1


@in_virtual_time
async def test_a_synchronous_run_of_three_learners_does_not_deadlock(tmp_path: Path):
    """Thirds do not add up in binary; a version that is off by rounding would be stale."""
    world = World(a_small_run(staleness={"max_staleness": 0}, learner={"updates": 3}), tmp_path)
    await world.create()
    learners = [world.learner(f"learner-{number}") for number in (1, 2, 3)]
    await finished(*learners, world.sampler("sampler-1"), world.sampler("sampler-2"), world.verifier())
    books = read_books(world)
    check_promises(world, books)
    assert books.version(VectorClock.of(books.counts)) >= 3 - 1e-9


def steal_from(learner: Peer, at_update: int) -> None:
    """A peer consumes one group of the learner's update a moment before it is committed."""
    stolen = False

    async def steal(writes: Sequence[Write]) -> None:
        nonlocal stolen
        head = decode_as(writes[-1].value, Head)
        if head.count == at_update and not stolen:
            stolen = True
            await learner.bus.put(Bucket.POLICY, writes[0].key, TRAINED.encode())

    learner.bus.before_commit = steal


@pytest.mark.parametrize("at_update", [1, 4, 8])
@in_virtual_time
async def test_a_learner_whose_group_was_trained_by_a_peer_rolls_back_and_goes_on(
    tmp_path: Path, at_update: int
):
    """At the last update as well: a run is not finished by a step that was never committed."""
    world = World(a_small_run(), tmp_path)
    await world.create()
    learner = world.learner()
    steal_from(learner, at_update)
    await finished(learner, world.sampler("sampler-1"), world.sampler("sampler-2"), world.verifier())
    books = read_books(world)
    check_exactly_once(books)
    check_staleness(world, books)
    assert books.counts == {"learner-1": 8}
    assert books.heads["learner-1"].groups_trained == len(books.trained) - 1, "the peer trained one"
    assert len(books.told("step_rolled_back")) == 1


@pytest.mark.parametrize("seed_of", ["learner-1", "another"])
@pytest.mark.parametrize("max_staleness", [4, 12])
@in_virtual_time
async def test_a_second_process_with_a_learners_name_is_fenced(
    tmp_path: Path, max_staleness: int, seed_of: str
):
    """With the learner's key or another. Even one that never gets as far as a commit, for every group it
    gets has seen the other's updates."""
    world = World(a_small_run(staleness={"max_staleness": max_staleness}, learner={"updates": 16}), tmp_path)
    await world.create()
    twin = Identity("learner-1", an_identity(seed_of).seed)
    twins = [world.learner(), world.learner(identity=twin)]
    others = [world.sampler("sampler-1"), world.sampler("sampler-2"), world.verifier()]
    outcomes = await asyncio.gather(*(twin.work for twin in twins), return_exceptions=True)
    await finished(*others)
    assert outcomes.count(None) == 1, "one goes on"
    why = "another process trains as learner 'learner-1'" if seed_of == "learner-1" else "has another key"
    assert why in str(flat(outcomes))
    books = read_books(world)
    check_exactly_once(books)
    assert books.counts == {"learner-1": 16}


def flat(outcomes: Sequence[object]) -> list[str]:
    """The texts of all errors, out of their groups."""
    texts: list[str] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseExceptionGroup):
            texts += flat(outcome.exceptions)
        elif isinstance(outcome, BaseException):
            texts.append(str(outcome))
    return texts


@in_virtual_time
async def test_a_group_ahead_of_every_head_is_dropped_not_held_for_ever(tmp_path: Path):
    """Somebody stored an update that was never committed, and sampled under it."""
    world = World(a_small_run(), tmp_path)
    await world.create()
    clock = VectorClock.of({"ghost": 5})
    entry = {"author": "ghost", "count": 5, "clock": clock, "signer": an_identity("ghost")}
    manifest, files = an_entry("test/updates/ghost/5-abc", **entry)
    learner = world.learner()
    while not world.broker.run(world.spec.name).buckets[Bucket.RUN].get(GENESIS_KEY):
        await world.clock.sleep(0.05)
    await world.store().publish(manifest, files)
    verified = a_verified_group(a_group(a_task(group_id="ghost.1", clock=clock)))
    await learner.bus.publish(Queue.VERIFIED, encode(verified, an_identity("verifier-1")), "ghost")
    await finished(learner, world.sampler("sampler-1"), world.sampler("sampler-2"), world.verifier())
    books = read_books(world)
    assert books.dropped["ghost.1"] == "ahead"
    assert books.counts == {"learner-1": 8}


@in_virtual_time
async def test_heads_of_more_learners_than_a_clock_can_name_do_not_stop_a_learner(tmp_path: Path):
    world = World(a_small_run(learner={"updates": 2}), tmp_path)
    await world.create()
    learner = world.learner()
    for number in range(LEARNERS_MAX + 1):
        ghost = an_identity(f"ghost-{number}")
        head = nothing_committed(world.spec.name, ghost.node).model_copy(update={"count": 1, "weight": 1.0})
        await learner.bus.put(Bucket.POLICY, head_key(ghost.node), encode(head, ghost))
    await finished(learner, world.sampler("sampler-1"), world.verifier())
    assert read_heads(world)["learner-1"].count == 2
