"""The committer: all or nothing, once, in order, whatever broker and store do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time
from protocol.codec import decode_as, encode
from protocol.errors import FencedError, StoreDenied
from protocol.identity import Identity
from protocol.manifest import MANIFEST_NAME, Manifest
from protocol.messages import Head
from protocol.ports import Write
from protocol.reasons import DropReason
from protocol.subjects import GENESIS_KEY, Bucket, done_key, head_key
from roles.learner.buffer import Candidate, Dropped
from roles.learner.committer import STEPS_WAITING_MAX, Committer, FinishedStep, nothing_committed
from roles.learner.done import outcome_of
from roles.learner.fake_policy import FakePolicy
from roles.learner.lease import Lease
from roles.learner.policy import at_hand
from roles.learner.register import Register
from roles.learner.stepper import SafePoint
from roles.policy.chains import PREVIOUS
from tests.ground import Fault, FaultyBus, Ground, Handed, a_candidate, an_update, running

GENESIS = FakePolicy().genesis(0)
HEAD = head_key("learner-1")


class Bench:
    """A committer with what it stands on, and steps to give it."""

    def __init__(
        self, ground: Ground, faults: Callable[[str, str], StoreFault | None] = lambda *_: None
    ) -> None:
        self.ground = ground
        self.bus: FaultyBus = ground.bus()
        ground.run.buckets[Bucket.RUN].write([Write(GENESIS_KEY, b"claimed")])
        self.committed: list[Head] = []
        self.register = Register("learner-1", GENESIS)
        self.committer = Committer(
            ground.ring(bus=self.bus),
            ground.store(faults),
            ground.offload,
            lambda _step, head, _listed: self.committed.append(head),
        )

    def step(self, *groups: str, drops: tuple[Dropped, ...] = (), published: bool = True) -> FinishedStep:
        """The next update, trained on ``groups``."""
        count = self.register.count + 1
        update = None
        if published:
            factors = {k: v + an_update(GENESIS, 1)[k] for k, v in self.register.base.items()}
            update = self.register.publish(factors, 1.0)
        trained = tuple(a_candidate(group, delivery=Handed()) for group in groups or (f"learner-1.{count}",))
        after = SafePoint(self.register, at_hand({})) if published else None
        return FinishedStep(trained, drops, update, after, cursor=10 + count, floor=count)

    @property
    def head(self) -> Head | None:
        """The head as the broker has it."""
        entry = self.ground.run.buckets[Bucket.POLICY].get(HEAD)
        return decode_as(entry.value, Head) if entry else None

    def done(self, group: str) -> str | None:
        entry = self.ground.run.buckets[Bucket.POLICY].get(done_key(group))
        return outcome_of(entry.value) if entry else None

    def manifests(self) -> list[Manifest]:
        entries = self.ground.bucket.entries
        return [Manifest.from_json(entries[path][MANIFEST_NAME], path) for path in sorted(entries)]


def said(group: Candidate | Dropped) -> list[str]:
    """How a group's delivery was settled."""
    delivery = group.lease._deliveries[0]
    assert isinstance(delivery, Handed)
    return delivery.said


@in_virtual_time
async def test_a_step_becomes_an_update_a_head_and_done_keys_then_it_is_acknowledged(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    drop = Dropped("learner-1.9", DropReason.STALE, Lease(Handed()))
    step = bench.step("learner-1.0", "learner-1.1", drops=(drop,))
    async with running(bench.committer):
        await bench.committer.submit(step)
        await bench.committer.drained()
    manifest, head = bench.manifests()[0], bench.head
    assert head is not None
    assert step.published is not None
    assert (head.count, head.clock, head.path) == (1, step.published.clock, manifest.path)
    assert (head.policy_digest, head.cursor) == (step.published.digest, 11)
    assert (head.groups_trained, head.groups_dropped) == (2, {"stale": 1})
    assert (manifest.groups, manifest.dropped) == (("learner-1.0", "learner-1.1"), {"learner-1.9": "stale"})
    assert [bench.done(g) for g in ("learner-1.0", "learner-1.1", "learner-1.9")] == ["trained"] * 2 + [
        "stale"
    ]
    assert [said(group) for group in step.trained] == [["ack"], ["ack"]]
    assert said(drop) == ["ack"]
    assert bench.committed == [head]


@in_virtual_time
async def test_nothing_is_acknowledged_before_the_commit(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    bench.bus.may_commit.clear()
    step = bench.step()
    async with running(bench.committer):
        await bench.committer.submit(step)
        await bench.ground.clock.sleep(5)
        assert (said(step.trained[0]), bench.head, len(bench.manifests())) == ([], None, 1)
        bench.bus.may_commit.set()
        await bench.committer.drained()
    assert said(step.trained[0]) == ["ack"]


@in_virtual_time
async def test_a_commit_that_landed_unseen_is_not_repeated(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    bench.bus.commit_faults.append(Fault.LANDED)
    async with running(bench.committer):
        await bench.committer.submit(bench.step())
        await bench.committer.submit(bench.step())
        await bench.committer.drained()
    assert bench.bus.commits == 2
    assert bench.head is not None
    assert bench.head.count == 2


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.ABSENT])
@in_virtual_time
async def test_a_commit_that_did_not_land_is_repeated(tmp_path: Path, fault: Fault):
    bench = Bench(Ground(tmp_path))
    bench.bus.commit_faults += [fault, fault]
    async with running(bench.committer):
        await bench.committer.submit(bench.step())
        await bench.committer.drained()
    assert bench.bus.commits == 3
    assert bench.head is not None


@in_virtual_time
async def test_a_group_that_a_peer_consumed_is_a_conflict_and_nothing_is_stored(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    await bench.bus.put(Bucket.POLICY, done_key("learner-1.1"), b"trained")
    first, second = bench.step("learner-1.0", "learner-1.1"), bench.step("learner-1.2")
    async with running(bench.committer):
        await bench.committer.submit(first)
        await bench.committer.submit(second)
        await bench.committer.drained()
        assert bench.committer.conflict
        assert (bench.head, bench.done("learner-1.0"), bench.done("learner-1.2")) == (None, None, None)
        assert [said(g) for g in (*first.trained, *second.trained)] == [[], [], []]
        assert bench.committer.take_conflict() == (first, second)
        assert bench.manifests() == [], "what was never committed must not look like it"
        bench.register = Register("learner-1", GENESIS)
        await bench.committer.submit(bench.step("learner-1.0"))
        await bench.committer.drained()
    assert bench.done("learner-1.0") == "trained"


@in_virtual_time
async def test_a_head_that_another_process_wrote_fences_this_one(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    foreign = nothing_committed("test", "learner-1").model_copy(update={"nonce": "theirs"})
    await bench.bus.put(Bucket.POLICY, HEAD, encode(foreign, Identity.deterministic("learner-1")))
    await bench.committer.submit(bench.step())
    with pytest.raises(FencedError, match="another process trains as learner 'learner-1'; stop one of them"):
        await bench.committer.run()


@in_virtual_time
async def test_an_unreadable_head_fences_as_well(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    await bench.bus.put(Bucket.POLICY, HEAD, b"no head")
    await bench.committer.submit(bench.step())
    with pytest.raises(FencedError):
        await bench.committer.run()


@pytest.mark.parametrize(
    "fault", [StoreFault.UNAVAILABLE, StoreFault.HANGING, StoreFault.TORN, StoreFault.LOST_ACK]
)
@in_virtual_time
async def test_a_store_in_trouble_is_tried_again_and_the_step_is_committed_once(
    tmp_path: Path, fault: StoreFault
):
    troubles = [fault, fault, None]
    bench = Bench(Ground(tmp_path), lambda _operation, _path: troubles.pop(0) if troubles else None)
    async with running(bench.committer):
        await bench.committer.submit(bench.step())
        await bench.committer.drained()
    assert (len(bench.manifests()), bench.bus.commits) == (1, 1)
    assert bench.head is not None


@in_virtual_time
async def test_a_store_that_denies_the_first_upload_is_told_to_the_operator(tmp_path: Path):
    bench = Bench(Ground(tmp_path), lambda *_: StoreFault.DENIED)
    await bench.committer.submit(bench.step())
    with pytest.raises(StoreDenied):
        await bench.committer.run()


@in_virtual_time
async def test_a_store_that_denies_a_later_upload_is_waited_for(tmp_path: Path):
    denied = False
    bench = Bench(Ground(tmp_path), lambda *_: StoreFault.DENIED if denied else None)
    async with running(bench.committer):
        await bench.committer.submit(bench.step())
        await bench.committer.drained()
        denied = True
        await bench.committer.submit(bench.step())
        await bench.ground.clock.sleep(300.0)
        assert len(bench.committed) == 1
        denied = False
        await bench.committer.drained()
    assert [head.count for head in bench.committed] == [1, 2]


@in_virtual_time
async def test_steps_are_committed_in_order_and_each_names_its_predecessor(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    async with running(bench.committer):
        for _ in range(4):
            await bench.committer.submit(bench.step())
        await bench.committer.drained()
    assert [head.count for head in bench.committed] == [1, 2, 3, 4]
    chain = [manifest.extra.get(PREVIOUS, "") for manifest in bench.manifests()]
    assert chain == ["", *(head.path for head in bench.committed[:3])]


@in_virtual_time
async def test_submitting_waits_only_while_the_queue_is_full(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    bench.bus.may_commit.clear()
    async with running(bench.committer):
        for _ in range(STEPS_WAITING_MAX):
            assert await bench.committer.submit(bench.step()) == 0.0
        last = asyncio.ensure_future(bench.committer.submit(bench.step()))
        await bench.ground.clock.sleep(7)
        assert not last.done()
        bench.bus.may_commit.set()
        assert await last == pytest.approx(7, abs=0.1)
        await bench.committer.drained()
    assert len(bench.committed) == STEPS_WAITING_MAX + 1


@in_virtual_time
async def test_drops_alone_are_committed_without_an_update_and_move_no_count(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    drop = Dropped("learner-1.9", DropReason.UNSCORABLE, Lease(Handed()))
    async with running(bench.committer):
        await bench.committer.submit(bench.step())
        await bench.committer.submit(FinishedStep((), (drop,), None, None, 12, 0))
        await bench.committer.drained()
    before, after = bench.committed
    assert (after.count, after.path, after.clock) == (before.count, before.path, before.clock)
    assert (after.groups_trained, after.groups_dropped, after.cursor) == (1, {"unscorable": 1}, 12)
    assert [event["version"] for event in bench.ground.told("update_committed")] == [1.0, 1.0]
    assert said(drop) == ["ack"]


@in_virtual_time
async def test_every_copy_of_a_group_is_acknowledged(tmp_path: Path):
    bench = Bench(Ground(tmp_path))
    step, copy = bench.step(), Handed()
    step.trained[0].lease.add(copy)
    async with running(bench.committer):
        await bench.committer.submit(step)
        await bench.committer.drained()
    assert (said(step.trained[0]), copy.said) == (["free", "ack"], ["ack"])
