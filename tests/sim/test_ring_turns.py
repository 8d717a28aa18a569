"""The whole ring under virtual time: promises of the design with peers, broker and learner in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.ports import Write
from protocol.subjects import Bucket, head_key
from tests.sim.books import Books, check_promises, read_books
from tests.sim.swarm import Peer, World, a_small_run
from tests.sim.virtual_time import simulate


async def a_swarm(world: World) -> tuple[Peer, Peer, Peer, Peer]:
    """A learner, two samplers and a verifier."""
    await world.create()
    return world.learner(), world.sampler("sampler-1"), world.sampler("sampler-2"), world.verifier()


async def finished(*peers: Peer) -> None:
    """All of them end by themselves."""
    await asyncio.gather(*(peer.work for peer in peers))


def test_a_run_reaches_its_last_update_and_every_promise_holds(tmp_path: Path):
    async def main() -> None:
        world = World(a_small_run(), tmp_path)
        await finished(*await a_swarm(world))
        books = read_books(world)
        check_promises(world, books)
        assert books.head.count == 8
        assert len(books.told("run_finished")) == 1

    simulate(main)


def trace(seed: int, directory: Path) -> list[tuple[object, ...]]:
    async def main() -> Books:
        world = World(a_small_run(seed=seed), directory)
        await finished(*await a_swarm(world))
        return read_books(world)

    books = simulate(main)
    events = [(e.at, e.node, e.name, tuple(sorted(e.fields.items()))) for e in books.events]
    return [*events, *((u.path, u.policy_digest, u.groups) for u in books.updates)]


def test_the_same_seed_gives_the_same_trace_and_another_seed_another(tmp_path: Path):
    first, again, other = (trace(seed, tmp_path / str(i)) for i, seed in enumerate((1, 1, 2)))
    assert first == again
    assert first != other


@pytest.mark.parametrize("publish_every", [1, 2])
def test_a_synchronous_run_does_not_deadlock_and_is_never_stale(tmp_path: Path, publish_every: int):
    async def main() -> None:
        spec = a_small_run(staleness={"max_staleness": 0}, learner={"publish_every": publish_every})
        world = World(spec, tmp_path)
        await finished(*await a_swarm(world))
        books = read_books(world)
        check_promises(world, books)
        assert books.head.count == 8
        assert {step["sample/staleness_max"] for step in books.told("step_trained")} == {0.0}
        assert books.dropped == {}

    simulate(main)


def test_a_broker_that_restarts_and_forgets_message_ids_costs_nothing(tmp_path: Path):
    async def main() -> None:
        world = World(a_small_run(), tmp_path)
        peers = await a_swarm(world)
        await committed(world, 3)
        await world.restart_broker(away_s=5.0)
        await finished(*peers)
        check_promises(world, read_books(world))

    simulate(main)


def test_the_groups_of_a_sampler_that_dies_are_sampled_by_another(tmp_path: Path):
    async def main() -> None:
        world = World(a_small_run(), tmp_path)
        await world.create()
        doomed = world.sampler("sampler-1", seconds_per_token=2.0)
        others = [world.learner(), world.verifier()]
        await until_busy(world, doomed)
        others.append(world.sampler("sampler-2"))
        await doomed.crash()
        await finished(*others)
        books = read_books(world)
        check_promises(world, books)
        assert books.head.count == 8

    simulate(main)


def test_a_learner_that_dies_between_upload_and_commit_goes_on_where_its_last_commit_ended(tmp_path: Path):
    async def main() -> None:
        world = World(a_small_run(), tmp_path)
        learner, *others = await a_swarm(world)
        uploaded = asyncio.Event()

        async def die_at_the_fourth_update(writes: Sequence[Write]) -> None:
            if read_books_count(world) == 3:
                uploaded.set()
                await asyncio.Event().wait()

        learner.bus.before_commit = die_at_the_fourth_update
        await uploaded.wait()
        await learner.crash()
        uploads = [path for path in world.bucket.entries if "/updates/learner-1/4-" in path]
        assert len(uploads) == 1
        await finished(world.learner(), *others)
        books = read_books(world)
        check_promises(world, books)
        assert books.head.count == 8
        assert world.policies[1].updates_seen[0] == 3
        resumed = books.told("learner_resumed")
        assert [event["version"] for event in resumed] == [3.0]

    simulate(main)


def test_what_a_drained_learner_held_is_at_once_free_for_its_successor(tmp_path: Path):
    async def main() -> None:
        world = World(a_small_run(), tmp_path)
        learner, *others = await a_swarm(world)
        await committed(world, 2)
        await learner.drain()
        queue = world.broker.run(world.spec.name).queues
        assert all(m.due is not None and m.due <= world.clock.monotonic() for q in queue.values() for m in q._taken.values() if b"VerifiedGroup" in m.data)
        await finished(world.learner(), *others)
        check_promises(world, read_books(world))

    simulate(main)


async def committed(world: World, count: int) -> None:
    """Wait until the learner's head has so many updates."""
    while read_books_count(world) < count:
        await world.clock.sleep(0.05)


def read_books_count(world: World) -> int:
    stored = world.broker.run(world.spec.name).buckets[Bucket.POLICY].get(head_key("learner-1"))
    return 0 if stored is None else read_books(world).head.count


async def until_busy(world: World, peer: Peer) -> None:
    """Wait until the peer holds a group."""
    from protocol.codec import decode_as
    from protocol.messages import NodeState
    from protocol.subjects import node_key

    while True:
        entry = world.broker.run(world.spec.name).buckets[Bucket.NODE].get(node_key(peer.name))
        if entry is not None and decode_as(entry.value, NodeState).busy:
            return
        await world.clock.sleep(0.5)
