"""How a run stands, off a real broker, for a program and for a person."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from node.nats_bus import NatsBus
from node.runs import create_run
from node.status import read_status, status_lines
from protocol.codec import encode
from protocol.errors import OperatorError
from protocol.messages import DeadLetter, Head, NodeState
from protocol.reasons import DeadReason
from protocol.runspec import RunSpec
from protocol.subjects import FINISHED_KEY, Bucket, Queue, cursor_key, done_key, head_key, node_key
from tests.build import RUN, a_clock, a_runspec, an_identity
from tests.node.sites import Site


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return a_runspec(store={"url": (tmp_path / "store").as_uri()}, learner={"updates": 8})


@pytest.fixture
async def bus(site: Site, spec: RunSpec, tmp_path: Path) -> AsyncIterator[NatsBus]:
    """A node on a run in which nothing happened yet."""
    bus = await NatsBus.connect(site.broker.access, RUN, node="watcher")
    await create_run(bus, spec, an_identity("watcher"), tmp_path / "cache")
    yield bus
    await bus.close()


async def show_up(bus: NatsBus, node: str, **changes: Any) -> None:
    who = an_identity(node)
    fields: dict[str, Any] = {"roles": ("sampler",), "host": "ada", "started_at": 1.0, "clock": a_clock(a=2)}
    state = NodeState(run=RUN, node=node, public_key=who.public_key, **(fields | changes))
    await bus.put(Bucket.NODE, node_key(node), encode(state, who))


async def commit(bus: NatsBus, learner: str, count: int, dropped: dict[str, int]) -> None:
    head = Head(
        run=RUN,
        learner=learner,
        count=count,
        clock=a_clock(**{learner: count}),
        weight=count,
        path=f"{RUN}/updates/{learner}/{count}-x",
        policy_digest="d",
        nonce="n",
        groups_trained=4 * count,
        groups_dropped=dropped,
    )
    await bus.put(Bucket.POLICY, head_key(learner), encode(head, an_identity(learner)))


async def bury(bus: NatsBus, group_id: str | None) -> None:
    reason = DeadReason.UNDECODABLE
    letter = DeadLetter(run=RUN, queue="task", reason=reason, node="sampler-1", group_id=group_id)
    await bus.bury(encode(letter, an_identity()))


async def test_a_run_that_does_not_exist_is_one_line(site: Site):
    bus = await NatsBus.connect(site.broker.access, "nothing", node="watcher")
    with pytest.raises(OperatorError, match="no run 'nothing' at this broker; create it with"):
        await read_status(bus, "nothing")
    await bus.close()


async def test_a_new_run_is_open_and_empty(bus: NatsBus, spec: RunSpec):
    status = await read_status(bus, RUN)
    assert (status["run"], status["spec"], status["finished"]) == (RUN, spec.digest, False)
    assert status["in_flight"] == {"task": 0, "rollout": 0, "verified": 0}
    assert status_lines(status) == [
        f"run {RUN}: version 0 of 8, open",
        "groups: 0 issued = 0 trained + 0 dropped + 0 dead + 0 in flight",
        "in flight: task 0, rollout 0, verified 0",
        "peers: nobody",
    ]


async def test_books_of_all_learners_and_queues_are_added_up(bus: NatsBus):
    await commit(bus, "a", 3, {"too_stale": 2})
    await commit(bus, "b", 2, {"too_stale": 1, "no_signal": 1})
    for learner, issued in (("a", b"20"), ("b", b"6 4")):
        await bus.put(Bucket.RUN, cursor_key(learner), issued)
    await bus.put(Bucket.POLICY, done_key("a.3"), b"trained a:1")
    for group_id in ("a.1", "a.1", "a.2", "a.3", None, "no group"):
        await bury(bus, group_id)
    await bus.publish(Queue.TASK, b"x", "1")
    await bus.publish(Queue.VERIFIED, b"x", "2")
    await bus.publish(Queue.EVAL_TASK, b"x", "3")  # evaluation is not training
    await bus.put(Bucket.RUN, FINISHED_KEY, b"1")
    books = "groups: 30 issued = 20 trained + 4 dropped (1 no_signal, 3 too_stale) + 2 dead + 2 in flight"
    books += ", and 2 not accounted for"
    assert status_lines(await read_status(bus, RUN)) == [
        f"run {RUN}: version 5 of 8, finished",
        books,
        "in flight: task 1, rollout 0, verified 1",
        "peers: nobody",
    ]


async def test_peers_are_listed_by_name_with_what_they_hold(bus: NatsBus):
    await show_up(bus, "b", roles=("sampler", "verifier"), busy=3, detail={"device": "cpu"})
    await show_up(bus, "a", roles=("learner",))
    status = await read_status(bus, RUN)
    peers = status["peers"]
    assert isinstance(peers, list)
    assert [peer["node"] for peer in peers] == ["a", "b"]
    assert (peers[1]["device"], peers[1]["busy"], peers[1]["clock"]) == ("cpu", 3, "a:2")
    lines = status_lines(status)
    assert lines[3] == "peers: 2"
    assert lines[5].split()[:6] == ["b", "sampler+verifier", "at", "a:2", "busy", "3"]
    assert lines[5].endswith("on ada")


async def test_what_one_peer_left_unreadable_hides_nothing_of_the_others(bus: NatsBus):
    await show_up(bus, "a")
    await commit(bus, "a", 3, {})
    await bus.put(Bucket.NODE, node_key("mallory"), b"rubbish")
    await bus.put(Bucket.POLICY, head_key("mallory"), b"rubbish")
    await bus.put(Bucket.RUN, cursor_key("mallory"), b"rubbish")
    await bus.bury(b"rubbish")
    status = await read_status(bus, RUN)
    assert (status["version"], status["groups_issued"], status["groups_dead"]) == (3, 0, 0)
    assert status_lines(status)[3] == "peers: 1"


async def test_a_peer_cannot_pass_for_another_nor_write_to_the_terminal(bus: NatsBus):
    await show_up(
        bus, "mallory", host="x\x1b[2J\nrun ok", roles=("a\nb",), detail={"node": "a", "clock": "z"}
    )
    (line,) = status_lines(await read_status(bus, RUN))[4:]
    assert line.split()[0] == "mallory"
    assert " a:2 " in line
    assert line.isprintable()
