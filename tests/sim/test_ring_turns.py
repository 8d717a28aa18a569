"""One learner's ring under virtual time: the promises, with peers, broker, store and learner in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time, simulate
from protocol.codec import decode_as
from protocol.messages import NodeState
from protocol.ports import Write
from protocol.subjects import Bucket, Queue, node_key
from roles.learner.learner import IDLE_STEPS_MAX
from tests.sim.books import Books, check_promises, read_books, read_heads
from tests.sim.swarm import Peer, World, a_small_run, some_tasks

LEARNER = "learner-1"


async def a_swarm(world: World) -> tuple[Peer, Peer, Peer, Peer]:
    """A learner, two samplers and a verifier."""
    await world.create()
    return world.learner(), world.sampler("sampler-1"), world.sampler("sampler-2"), world.verifier()


async def finished(*peers: Peer) -> None:
    """All of them end by themselves."""
    await asyncio.gather(*(peer.work for peer in peers))


async def committed(world: World, count: int) -> None:
    """Wait until the learner's head has so many updates."""
    while (heads := read_heads(world)).get(LEARNER) is None or heads[LEARNER].count < count:
        await world.clock.sleep(0.05)


async def busy(world: World, peer: Peer) -> None:
    """Wait until the peer says that it holds a group."""
    presence = world.broker.run(world.spec.name).buckets[Bucket.NODE]
    while (entry := presence.get(node_key(peer.name))) is None or not decode_as(entry.value, NodeState).busy:
        await world.clock.sleep(0.5)


@in_virtual_time
async def test_a_run_reaches_its_last_update_and_every_promise_holds(tmp_path: Path):
    world = World(a_small_run(), tmp_path)
    await finished(*await a_swarm(world))
    books = read_books(world)
    check_promises(world, books)
    assert books.counts == {LEARNER: 8}
    assert len(books.told("run_finished")) == 1
    assert [event["version"] for event in books.told("evaluated")] == [0.0, 4.0, 8.0]


def trace(seed: int, directory: Path) -> list[tuple[object, ...]]:
    """Everything that can be seen of a short run."""

    async def main() -> Books:
        world = World(a_small_run(seed=seed, learner={"updates": 3}), directory)
        await finished(*await a_swarm(world))
        return read_books(world)

    books = simulate(main)
    events = [(e.at, e.node, e.name, tuple(sorted(e.fields.items()))) for e in books.events]
    return [*events, *((u.path, u.policy_digest, u.groups) for u in books.updates[LEARNER])]


def test_the_same_seed_gives_the_same_trace_and_another_seed_another(tmp_path: Path):
    first, again, other = (trace(seed, tmp_path / str(i)) for i, seed in enumerate((1, 1, 2)))
    assert first == again
    assert first != other


@pytest.mark.parametrize("publish_every", [1, 2])
@in_virtual_time
async def test_a_synchronous_run_does_not_deadlock_and_is_never_stale(tmp_path: Path, publish_every: int):
    spec = a_small_run(
        staleness={"max_staleness": 0},
        learner={"publish_every": publish_every, "updates": 8 // publish_every},
    )
    world = World(spec, tmp_path)
    await finished(*await a_swarm(world))
    books = read_books(world)
    check_promises(world, books)
    assert books.counts == {LEARNER: 8 // publish_every}
    assert {step["sample/staleness_max"] for step in books.told("step_trained")} == {0.0}
    assert books.dropped == {}


@pytest.mark.parametrize("publish_every", [1, 2])
@in_virtual_time
async def test_groups_that_cannot_be_scored_or_never_arrive_do_not_stop_a_synchronous_run(
    tmp_path: Path, publish_every: int
):
    spec = a_small_run(staleness={"max_staleness": 0}, learner={"publish_every": publish_every, "updates": 4})
    world = World(spec, tmp_path, tasks=some_tasks(unanswered=6))
    world.misread |= {"6", "7", "8"}
    await finished(*await a_swarm(world))
    books = read_books(world)
    check_promises(world, books)
    assert books.counts == {LEARNER: 4}
    assert set(books.dropped.values()) == {"unscorable"}
    assert len(books.dead) >= 3


@in_virtual_time
async def test_drops_are_committed_alone_and_make_room_for_more(tmp_path: Path):
    world = World(a_small_run(), tmp_path, tasks=some_tasks(unanswered=16))
    peers = await a_swarm(world)
    await world.clock.sleep(10.0)
    books = read_books(world)
    check_promises(world, books)
    assert set(books.dropped.values()) == {"unscorable"}
    assert len(books.dropped) > 40
    for peer in peers:
        await peer.drain()


class AlwaysEven:
    """Decodes to the right answer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "even"


@in_virtual_time
async def test_a_run_in_which_nothing_is_left_to_learn_ends(tmp_path: Path):
    world = World(a_small_run(learner={"groups_per_update": 1}, eval={"problems": 0}), tmp_path)
    world.decoder = AlwaysEven()
    await finished(*await a_swarm(world))
    books = read_books(world)
    check_promises(world, books)
    assert (books.counts, len(books.told("step_trained"))) == ({LEARNER: 0}, IDLE_STEPS_MAX)
    assert len(books.told("run_finished")) == 1


@in_virtual_time
async def test_a_broker_that_restarts_and_forgets_message_ids_costs_nothing(tmp_path: Path):
    world = World(a_small_run(), tmp_path)
    peers = await a_swarm(world)
    await committed(world, 3)
    await world.restart_broker(away_s=5.0)
    await finished(*peers)
    books = read_books(world)
    check_promises(world, books)
    assert books.counts == {LEARNER: 8}


@in_virtual_time
async def test_a_store_that_fails_every_third_call_costs_nothing(tmp_path: Path):
    calls = 0
    passing = [fault for fault in StoreFault if fault is not StoreFault.DENIED]

    def faults(operation: str, path: str) -> StoreFault | None:
        nonlocal calls
        calls += 1
        return passing[calls // 3 % len(passing)] if calls % 3 == 0 else None

    world = World(a_small_run(), tmp_path, faults=faults)
    await finished(*await a_swarm(world))
    books = read_books(world)
    check_promises(world, books)
    assert books.counts == {LEARNER: 8}


@in_virtual_time
async def test_the_groups_of_a_sampler_that_dies_are_sampled_by_another(tmp_path: Path):
    world = World(a_small_run(), tmp_path)
    await world.create()
    doomed = world.sampler("sampler-1", seconds_per_token=2.0)
    others = [world.learner(), world.verifier()]
    await busy(world, doomed)
    others.append(world.sampler("sampler-2"))
    await doomed.crash()
    await finished(*others)
    books = read_books(world)
    check_promises(world, books)
    assert books.counts == {LEARNER: 8}
    assert {event.node for event in books.events if event.name == "group_sampled"} == {"sampler-2"}


@in_virtual_time
async def test_a_learner_that_dies_between_upload_and_commit_goes_on_where_its_last_commit_ended(
    tmp_path: Path,
):
    world = World(a_small_run(), tmp_path)
    learner, *others = await a_swarm(world)
    uploaded = asyncio.Event()

    async def die_before_the_fourth_update(writes: Sequence[Write]) -> None:
        if any("/updates/learner-1/4-" in path for path in world.bucket.entries):
            uploaded.set()
            await asyncio.Event().wait()

    learner.bus.before_commit = die_before_the_fourth_update
    await uploaded.wait()
    await learner.crash()
    await finished(world.learner(), *others)
    books = read_books(world)
    check_promises(world, books)
    assert books.counts == {LEARNER: 8}
    assert world.policies[1].updates_seen[0] == 3, "the fourth update is made again"
    assert [event["version"] for event in books.told("learner_resumed")] == [3.0]


@in_virtual_time
async def test_what_a_drained_learner_held_is_at_once_free_for_its_successor(tmp_path: Path):
    world = World(a_small_run(), tmp_path)
    learner, *others = await a_swarm(world)
    await committed(world, 2)
    await learner.drain()
    verified = world.broker.run(world.spec.name).queues[Queue.VERIFIED]
    assert len(verified._taken) > 0
    assert all((message.due or 0.0) <= world.clock.monotonic() for message in verified._taken.values())
    await finished(world.learner(), *others)
    books = read_books(world)
    check_promises(world, books)
    assert books.counts == {LEARNER: 8}
