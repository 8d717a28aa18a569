"""How a run stands: peers, queues, heads and books, as the broker reports them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

from node.nats_bus import NatsBus
from protocol.codec import decode_as
from protocol.errors import DecodeError, OperatorError, one_line
from protocol.messages import DeadLetter, Head, Message, NodeState, RunState
from protocol.runspec import RunSpec
from protocol.subjects import FINISHED_KEY, SPEC_KEY, TRAINING, Bucket

M = TypeVar("M", bound=Message)


async def read_status(bus: NatsBus, run: str) -> dict[str, object]:
    """Everything ``grpo-node status`` shows. Raises OperatorError if there is no such run."""
    entry = await bus.get(Bucket.RUN, SPEC_KEY) if await bus.exists() else None
    if entry is None:
        raise OperatorError(f"no run {run!r} at this broker; create it with: grpo-node create RUN.toml")
    spec = RunSpec.model_validate_json(decode_as(entry.value, RunState).spec_json)
    nodes = _readable((e.value for e in (await bus.list(Bucket.NODE, "node")).values()), NodeState)
    heads = _readable((e.value for e in (await bus.list(Bucket.POLICY, "head")).values()), Head)
    cursors = [e.value for e in (await bus.list(Bucket.RUN, "cursor")).values()]
    depths = {queue.value: (await bus.depth(queue)).total for queue in TRAINING}
    dead = _readable(await bus.dead_letters(), DeadLetter)
    dropped: dict[str, int] = {}
    for head in heads:
        for reason, count in head.groups_dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return {
        "run": run,
        "spec": spec.digest,
        "finished": await bus.get(Bucket.RUN, FINISHED_KEY) is not None,
        "version": sum(head.weight for head in heads),
        "updates_wanted": spec.learner.updates,
        "groups_issued": sum(int(cursor) for cursor in cursors if cursor.isdigit()),
        "groups_trained": sum(head.groups_trained for head in heads),
        "groups_dropped": dropped,
        "groups_dead": len({letter.group_id or id(letter) for letter in dead}),
        "in_flight": depths,
        "peers": [_peer(node) for node in sorted(nodes, key=lambda node: node.node)],
    }


def _readable(frames: Iterable[bytes], kind: type[M]) -> list[M]:
    """The messages among what peers left there; a fault of one of them must not hide the others."""
    messages = []
    for frame in frames:
        with suppress(DecodeError):
            messages.append(decode_as(frame, kind))
    return messages


def _peer(node: NodeState) -> dict[str, Any]:
    return {
        **node.detail,
        "node": node.node,
        "roles": list(node.roles),
        "host": node.host,
        "clock": node.clock.text,
        "busy": node.busy,
        "up_s": round(time.time() - node.started_at),
    }


def status_lines(status: dict[str, Any]) -> list[str]:
    """The same for a person."""
    state = "finished" if status["finished"] else "open"
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(status["groups_dropped"].items()))
    flight = ", ".join(f"{queue} {count}" for queue, count in status["in_flight"].items())
    groups = f"{status['groups_issued']} issued, {status['groups_trained']} trained"
    return [
        f"run {status['run']}: version {status['version']:g} of {status['updates_wanted']}, {state}",
        f"groups: {groups}, dropped: {dropped or 'none'}, dead: {status['groups_dead']}",
        f"in flight: {flight}",
        f"peers: {len(status['peers']) or 'nobody'}",
        *(_peer_line(peer) for peer in status["peers"]),
    ]


def _peer_line(peer: dict[str, Any]) -> str:
    roles = one_line("+".join(peer["roles"]))
    where = f"up {peer['up_s']} s on {one_line(peer['host'])}"
    return f"  {peer['node']:<16} {roles:<18} at {peer['clock']:<20} busy {peer['busy']:<4} {where}"
