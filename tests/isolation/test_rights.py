"""The one table of rights: enough for every role, and for nothing that no role does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from node.entry_cache import EntryCache
from node.rights import EXPORTS, imports
from node.run_bus import find_run
from node.system_clock import SystemClock
from protocol.codec import encode
from protocol.errors import BusError, StoreUnavailable
from protocol.limits import INLINE_BYTES_MAX
from protocol.messages import RunState
from protocol.subjects import SPEC_KEY, STANDINGS, Bucket, Queue, standing_key
from tests.build import an_entry, an_identity
from tests.isolation.ground import Guarded, SeenAccess
from tests.sim.site import Site
from tests.sim.swarm import World, a_small_run

T = TypeVar("T")

SELDOM = (
    ("$O.*.C.*.*", "payloads by reference: the ring of this test is too small for one"),
    ("$JS.API.DIRECT.GET.OBJ_*", "the same, read"),
    ("$O.*_adapters.*.*", "adapters in the broker; this run's lie elsewhere"),
    ("$JS.API.DIRECT.GET.OBJ_*_adapters.>", "the same, read"),
    ("$JS.API.STREAM.INFO.OBJ_*_adapters", "the same, listed"),
    ("$KV.*_run.standing.*", "this run audits nobody"),
    ("$JS.API.DIRECT.GET.KV_*_run.$KV.*.standing.*", "the same, read"),
    ("$JS.API.DIRECT.GET.KV_*_run", "the same, of all samplers"),
    ("$JS.API.DIRECT.GET.KV_*_run.$KV.*.genesis", "a verifier needs it for audits"),
    ("$JS.API.DIRECT.GET.KV_*_policy", "the same"),
    ("$JS.API.DIRECT.GET.grpo_*", "whether a message whose payload is gone was settled; dead letters"),
    ("$JS.API.CONSUMER.INFO.grpo_*.*", "depth of a queue whose groups do not come; every taker asks it, too"),
    ("$JS.API.STREAM.INFO.KV_*_policy", "to list more keys than one answer holds"),
    ("grpo.v1.*.event.node.*", "told by a process of its own, of which this test has none"),
    ("grpo.v1.*.dead.*", "nothing was wrong with any message"),
    ("$JS.API.DIRECT.GET.KV_*_policy.$KV.*.head.*", "a head is read alone after a commit in doubt"),
    ("$JS.API.DIRECT.GET.KV_*_policy.$KV.*.done.>", "the same, of a group"),
)
"""Rights that a run without trouble does not use, and why a node has them."""


def covers(pattern: str, subject: str) -> bool:
    """NATS subject matching; ``*`` inside a token is ours, for the table above."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1] if len(given) >= len(wanted) else []
    return len(wanted) == len(given) and all(_token(w, g) for w, g in zip(wanted, given, strict=True))


def _token(wanted: str, given: str) -> bool:
    head, star, tail = wanted.partition("*")
    return wanted == given or (bool(star) and given.startswith(head) and given.endswith(tail))


class AtOnce(Site):
    """Heavy work takes no time."""

    async def offload(self, work: Callable[[], T]) -> T:
        return work()


class GuardedWorld(World):
    """The simulated swarm's roles on a real broker: fake model and engine, real time, invited nodes."""

    def __init__(self, guarded: Guarded, directory: Path) -> None:
        super().__init__(guarded.spec, directory)
        self.clock = SystemClock()
        self.guarded = guarded
        self.access: dict[str, SeenAccess] = {}
        self._buses: dict[str, Any] = {}

    async def admit(self, role: str, name: str) -> None:
        """Invite, connect, and find the run, as every node does."""
        self.access[name] = await self.guarded.access(role, node=name)
        self._buses[name] = await self.guarded.enter(self.access[name], name)
        assert await find_run(self._buses[name]) is not None

    def _site(self, name: str) -> Site:
        return AtOnce(self._buses[name], self.store(), self.clock)


@pytest.fixture
def spec_of_the_ring() -> Any:
    return a_small_run()


async def test_the_ring_turns_on_these_rights_and_uses_all_of_them(tmp_path: Path, spec_of_the_ring: Any):
    guarded = await Guarded(tmp_path, spec=spec_of_the_ring).open()
    try:
        state = RunState(
            spec_json=guarded.spec.model_dump_json(), spec_digest=guarded.spec.digest, creator="owner"
        )
        await guarded.owner.put(Bucket.RUN, SPEC_KEY, encode(state, an_identity("owner")))
        world = GuardedWorld(guarded, tmp_path / "caches")
        await asyncio.gather(
            *(world.admit(role, f"{role}-{n}") for role in ("learner", "sampler", "verifier") for n in (1, 2))
        )
        async with asyncio.timeout(60):
            peers = [world.verifier("verifier-1"), world.verifier("verifier-2")]
            peers += [world.sampler("sampler-1"), world.sampler("sampler-2")]
            peers += [world.learner("learner-1"), world.learner("learner-2")]
            await asyncio.gather(*(peer.work for peer in peers))
        heads = await guarded.owner.list(Bucket.POLICY, "head")
        assert set(heads) == {"head.learner-1", "head.learner-2"}
    finally:
        await guarded.close()
    for role in ("learner", "sampler", "verifier"):
        used: set[str] = set()
        for number in (1, 2):
            name = f"{role}-{number}"
            rights = [each.subject for each in imports(guarded.spec.name, [role], name) if not each.stream]
            spoken = world.access[name].used
            assert [s for s in spoken if not any(covers(right, s) for right in rights)] == []
            used |= {subject.replace(name, f"{role}-1") for subject in spoken}
        for right in imports(guarded.spec.name, [role], f"{role}-1"):
            if not right.stream and not any(covers(pattern, right.subject) for pattern, _ in SELDOM):
                assert any(covers(right.subject, subject) for subject in used), f"{role} never needs {right}"


async def test_large_payloads_pass_from_role_to_role(guarded: Guarded):
    learner, sampler, verifier = [
        await guarded.bus(role, node=f"{role}-1") for role in ("learner", "sampler", "verifier")
    ]
    data = bytes(range(256)) * (2 * INLINE_BYTES_MAX // 256)
    for author, queue, taker in (
        (learner, Queue.TASK, sampler),
        (sampler, Queue.ROLLOUT, verifier),
        (verifier, Queue.VERIFIED, learner),
    ):
        await author.publish(queue, data, f"m-{queue}")
        consumer = await taker.consume(queue, 1)
        async with asyncio.timeout(10):
            delivery = await consumer.next()
        assert delivery.data == data
        await delivery.ack()
        await consumer.close()
    assert (await learner.depth(Queue.VERIFIED)).total == 0


@pytest.mark.parametrize("role", ["learner", "sampler", "verifier"])
def test_no_right_makes_changes_or_empties_a_stream_or_a_consumer(role: str):
    for right in imports("run", [role], "node-1"):
        for word in ("CREATE", "DELETE", "PURGE", "UPDATE", "RESTORE", "SNAPSHOT", "$SYS", "MSG.GET"):
            assert word not in right.subject.replace("CONSUMER.MSG.NEXT", "")
        assert right.subject != ">"
        assert any(
            covers(export.subject, right.subject) for export in EXPORTS if export.stream == right.stream
        )


def test_a_node_writes_under_its_own_name_only():
    rights = [right.subject for right in imports("run", ["sampler"], "bob")]
    written = [r for r in rights if r.startswith(("grpo.", "$KV.", "$O."))]
    assert all("bob" in subject.split(".") or ".announce." in subject for subject in written)
    assert not any("verified" in right or "rollout.*" in right for right in rights)


async def test_adapters_in_the_broker_are_written_by_learners_and_read_by_all(
    guarded: Guarded, tmp_path: Path
):
    await guarded.owner.create_adapter_store()
    stores = {}
    for role in ("learner", "sampler", "verifier"):
        bus = await guarded.bus(role, node=f"{role}-1")
        stores[role] = bus.adapter_store(EntryCache(tmp_path / role), timeout_s=5)
    manifest, files = an_entry()
    for role in ("sampler", "verifier"):
        with pytest.raises(StoreUnavailable):
            await stores[role].publish(manifest, files)
    assert await stores["learner"].list("") == []
    await stores["learner"].publish(manifest, files)
    for store in stores.values():
        copy = await store.fetch(manifest.path)
        assert {name: (copy / name).read_bytes() for name in files} == files
    assert await stores["learner"].list("") == [manifest.path]
    await stores["learner"].delete(manifest.path)
    assert await stores["learner"].list("") == []


async def test_verifiers_judge_samplers_and_samplers_nobody(guarded: Guarded):
    learner, sampler, verifier = [
        await guarded.bus(role, node=f"{role}-1") for role in ("learner", "sampler", "verifier")
    ]
    key = standing_key(an_identity("sampler-1").public_key)
    await verifier.put(Bucket.RUN, key, b"refused", expected=0)
    for peer in (learner, sampler):
        assert set(await peer.list(Bucket.RUN, STANDINGS)) == {key}
        with pytest.raises(BusError):
            await peer.put(Bucket.RUN, key, b"innocent")
    entry = await verifier.get(Bucket.RUN, key)
    assert entry is not None
    assert entry.value == b"refused"
