"""The contract of every bus, second half: keys, atomic commits and announcements."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import MessageTooLarge, WrongRevision
from protocol.limits import BATCH_WRITES_MAX
from protocol.ports import Entry, Write
from protocol.subjects import Bucket, done_key, head_key
from tests.contract.brokers import Hub, eventually

B = Bucket.POLICY
HEAD = head_key("learner-1")


# --- single keys ---------------------------------------------------------------------------------


async def test_a_value_is_read_back_with_its_revision(hub: Hub):
    bus = await hub.bus()
    assert await bus.get(B, HEAD) is None
    revision = await bus.put(B, HEAD, b"\x00\xff")
    assert await bus.get(B, HEAD) == Entry(HEAD, b"\x00\xff", revision)
    assert await bus.put(B, HEAD, b"") > revision
    assert (await bus.get(B, HEAD) or Entry("", b"?", 0)).value == b""


async def test_a_key_is_created_once(hub: Hub):
    bus, rival = await hub.bus("node-1"), await hub.bus("node-2")
    await bus.put(B, HEAD, b"mine", expected=0)
    with pytest.raises(WrongRevision):
        await rival.put(B, HEAD, b"theirs", expected=0)
    assert (await rival.get(B, HEAD) or Entry("", b"", 0)).value == b"mine"


async def test_of_many_writers_with_one_revision_one_wins(hub: Hub):
    bus = await hub.bus()
    revision = await bus.put(B, HEAD, b"0")
    writes = (bus.put(B, HEAD, b"%d" % i, expected=revision) for i in range(1, 9))
    results = await asyncio.gather(*writes, return_exceptions=True)
    winners = [result for result in results if not isinstance(result, BaseException)]
    assert len(winners) == 1
    assert sum(isinstance(result, WrongRevision) for result in results) == 7
    entry = await bus.get(B, HEAD)
    assert entry is not None
    assert entry.revision == winners[0]


async def test_a_deleted_key_is_absent_and_can_be_created_again(hub: Hub):
    bus = await hub.bus()
    await bus.delete(B, HEAD)  # absent: no error
    await bus.put(B, HEAD, b"1", expected=0)
    await bus.delete(B, HEAD)
    assert await bus.get(B, HEAD) is None
    assert await bus.list(B, "") == {}
    await bus.put(B, HEAD, b"2", expected=0)
    with pytest.raises(WrongRevision):
        await bus.put(B, HEAD, b"3", expected=0)


async def test_a_value_with_a_ttl_expires_and_its_key_can_be_created_again(hub: Hub):
    bus = await hub.bus()
    key = "learner-1"
    await bus.put(Bucket.NODE, key, b"older", ttl_s=3600)
    await bus.put(Bucket.NODE, key, b"here", ttl_s=1)
    await bus.put(Bucket.NODE, "other", b"stays", ttl_s=60)
    assert set(await bus.list(Bucket.NODE, "")) == {key, "other"}

    async def gone() -> bool:
        return await bus.get(Bucket.NODE, key) is None

    await eventually(gone)
    assert set(await bus.list(Bucket.NODE, "")) == {"other"}
    await bus.put(Bucket.NODE, key, b"back", expected=0, ttl_s=1)


async def test_a_list_holds_the_live_keys_below_a_prefix_in_order(hub: Hub):
    bus = await hub.bus()
    for key in ("head.b", "head.a", "headless", "done.g1", "head.a.deep"):
        await bus.put(B, key, key.encode())
    heads = await bus.list(B, "head")
    assert list(heads) == ["head.a", "head.a.deep", "head.b"]
    assert heads["head.b"].value == b"head.b"
    assert list(await bus.list(B, "")) == ["done.g1", "head.a", "head.a.deep", "head.b", "headless"]
    assert await bus.list(B, "nothing") == {}


async def test_buckets_do_not_mix(hub: Hub):
    bus = await hub.bus()
    await bus.put(Bucket.RUN, "spec", b"run")
    assert await bus.get(Bucket.NODE, "spec") is None


@pytest.mark.parametrize("key", ["", "a..b", ".a", "a.", "a b", "head.*", "head.>", "a\n", "a/b"])
async def test_a_key_that_is_no_subject_is_our_bug(hub: Hub, key: str):
    bus = await hub.bus()
    for call in (bus.get(B, key), bus.put(B, key, b""), bus.delete(B, key), bus.commit(B, [Write(key, b"")])):
        with pytest.raises(ValueError):
            await call


async def test_a_value_beyond_the_brokers_limit_is_refused_and_the_bus_goes_on(hub: Hub):
    bus = await hub.bus()
    with pytest.raises(MessageTooLarge):
        await bus.put(B, HEAD, bytes(2 << 20))
    with pytest.raises(MessageTooLarge):
        await bus.commit(B, [Write("done.g1", b"", 0), Write(HEAD, bytes(2 << 20))])
    assert await bus.list(B, "") == {}
    await bus.put(B, HEAD, b"fine")


# --- commits -------------------------------------------------------------------------------------


async def test_a_commit_writes_everything_and_returns_the_last_revision(hub: Hub):
    bus = await hub.bus()
    writes = [Write(done_key(f"g{i}"), b"1", expected=0, ttl_s=3600) for i in range(64)]
    revision = await bus.commit(B, [*writes, Write(HEAD, b"head", expected=0)])
    assert await bus.get(B, HEAD) == Entry(HEAD, b"head", revision)
    assert len(await bus.list(B, "done")) == 64


async def test_a_group_that_somebody_else_committed_stops_the_whole_commit(hub: Hub):
    bus, rival = await hub.bus("node-1"), await hub.bus("node-2")
    await rival.commit(B, [Write("done.g2", b"", 0), Write(head_key("learner-2"), b"x", 0)])
    with pytest.raises(WrongRevision):
        await bus.commit(B, [Write("done.g1", b"", 0), Write("done.g2", b"", 0), Write(HEAD, b"x", 0)])
    assert await bus.get(B, "done.g1") is None
    assert await bus.get(B, HEAD) is None


@pytest.mark.parametrize("head_first", [True, False])
async def test_a_stale_head_stops_the_whole_commit(hub: Hub, head_first: bool):
    bus = await hub.bus()
    revision = await bus.put(B, HEAD, b"1")
    await bus.put(B, HEAD, b"2")
    writes = [Write(HEAD, b"3", expected=revision), Write("done.g1", b"", expected=0)]
    with pytest.raises(WrongRevision):
        await bus.commit(B, writes if head_first else writes[::-1])
    assert await bus.get(B, "done.g1") is None
    assert (await bus.get(B, HEAD) or Entry("", b"", 0)).value == b"2"


async def test_writes_with_and_without_an_expected_revision_mix(hub: Hub):
    bus = await hub.bus()
    await bus.put(B, "cursor", b"0")
    await bus.commit(B, [Write("done.g1", b"", 0), Write("cursor", b"1"), Write(HEAD, b"x", 0)])
    await bus.commit(B, [Write("cursor", b"2"), Write("other", b"")])
    assert (await bus.get(B, "cursor") or Entry("", b"", 0)).value == b"2"


async def test_of_concurrent_commits_over_one_group_one_wins(hub: Hub):
    buses = [await hub.bus(f"node-{i}") for i in range(4)]
    commits = (
        bus.commit(
            B, [Write("done.g1", b"", 0), Write(f"done.own-{i}", b"", 0), Write(f"head.l{i}", b"x", 0)]
        )
        for i, bus in enumerate(buses)
    )
    results = await asyncio.gather(*commits, return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, WrongRevision) for result in results) == 3
    assert len(await buses[0].list(B, "head")) == 1
    assert len(await buses[0].list(B, "done")) == 2


async def test_a_commit_of_one_write_is_a_compare_and_set(hub: Hub):
    bus = await hub.bus()
    revision = await bus.commit(B, [Write(HEAD, b"1", expected=0)])
    with pytest.raises(WrongRevision):
        await bus.commit(B, [Write(HEAD, b"2", expected=0)])
    assert await bus.commit(B, [Write(HEAD, b"2", expected=revision)]) > revision


async def test_a_done_key_expires_with_its_ttl(hub: Hub):
    bus = await hub.bus()
    await bus.commit(B, [Write("done.g1", b"", 0, ttl_s=1), Write(HEAD, b"x", 0)])

    async def gone() -> bool:
        return await bus.get(B, "done.g1") is None

    await eventually(gone)
    assert list(await bus.list(B, "")) == [HEAD]


async def test_a_commit_has_a_limit_and_names_each_key_once(hub: Hub):
    bus = await hub.bus()
    with pytest.raises(MessageTooLarge):
        await bus.commit(B, [Write(f"done.g{i}", b"", 0) for i in range(BATCH_WRITES_MAX + 1)])
    await bus.commit(B, [Write(f"done.g{i}", b"", 0) for i in range(BATCH_WRITES_MAX)])
    assert len(await bus.list(B, "done")) == BATCH_WRITES_MAX
    for wrong in ([], [Write("a", b""), Write("a", b"")], [Write("a", b"", -1)], [Write("a", b"", None, 0)]):
        with pytest.raises(ValueError):
            await bus.commit(B, wrong)


# --- announcements -------------------------------------------------------------------------------


async def test_every_node_hears_of_committed_heads_and_of_nothing_else(hub: Hub):
    bus = await hub.bus("node-1")
    listeners = [(await hub.bus(f"node-{i}")).announcements() for i in (2, 3)]
    first = await bus.commit(B, [Write("done.g1", b"", 0), Write(HEAD, b"1", 0)])
    with pytest.raises(WrongRevision):
        await bus.commit(B, [Write("done.g1", b"", 0), Write(HEAD, b"lost", first)])
    await bus.put(Bucket.RUN, "head.false", b"another bucket")
    second = await bus.put(B, head_key("learner-2"), b"2")
    for listener in listeners:
        async with asyncio.timeout(10):
            assert await anext(listener) == Entry(HEAD, b"1", first)
            assert await anext(listener) == Entry(head_key("learner-2"), b"2", second)


async def test_announcements_end_when_the_bus_is_closed(hub: Hub):
    bus = await hub.bus()
    listener = bus.announcements()
    await bus.put(B, HEAD, b"1")
    await bus.close()
    async with asyncio.timeout(10):
        assert len([entry async for entry in listener]) <= 1


async def test_creating_again_changes_no_revision(hub: Hub):
    """That a new life of a run begins later than the one before is told by ``test_broker_disk_loss``."""
    bus = await hub.stranger()
    await bus.create_run(hub.spec)
    first = await bus.put(Bucket.POLICY, "a", b"1", expected=0)
    await bus.create_run(hub.spec)
    assert await bus.put(Bucket.POLICY, "a", b"2", expected=first) == first + 1
