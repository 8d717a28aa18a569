"""How a run stands: peers, queues, heads and books, as the broker reports them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from pydantic import TypeAdapter, ValidationError

from node.nats_bus import NatsBus
from node.run_bus import find_run, no_run
from protocol.codec import readable
from protocol.errors import one_line
from protocol.messages import DeadLetter, GroupId, Head, NodeState
from protocol.runspec import RunSpec
from protocol.subjects import FINISHED_KEY, TRAINING, Bucket
from roles.learner.done import is_done
from roles.learner.outstanding import Cursor

_TRAINING = {queue.value for queue in TRAINING}


async def read_status(bus: NatsBus, run: str) -> dict[str, object]:
    """Everything ``grpo-node status`` shows. Raises OperatorError if there is no such run."""
    state = await find_run(bus)
    if state is None:
        raise no_run(run)
    spec = RunSpec.model_validate_json(state.spec_json)
    nodes = readable((e.value for e in (await bus.list(Bucket.NODE, "node")).values()), NodeState)
    heads = readable((e.value for e in (await bus.list(Bucket.POLICY, "head")).values()), Head)
    cursors = [e.value for e in (await bus.list(Bucket.RUN, "cursor")).values()]
    depths = {queue.value: (await bus.depth(queue)).total for queue in TRAINING}
    dropped: Counter[str] = Counter()
    for head in heads:
        dropped.update(head.groups_dropped)
    issued = sum(Cursor.parse(cursor).issued for cursor in cursors)
    trained = sum(head.groups_trained for head in heads)
    dead = await _dead(bus)
    return {
        "run": run,
        "spec": spec.digest,
        "finished": await bus.get(Bucket.RUN, FINISHED_KEY) is not None,
        "version": sum(head.weight for head in heads),
        "updates_wanted": spec.learner.updates,
        "groups_issued": issued,
        "groups_trained": trained,
        "groups_dropped": {reason: count for reason, count in sorted(dropped.items()) if count},
        "groups_dead": dead,
        "in_flight": depths,
        "groups_missing": issued - trained - dropped.total() - dead - sum(depths.values()),
        "peers": [_peer(node) for node in sorted(nodes, key=lambda node: node.node)],
    }


async def _dead(bus: NatsBus) -> int:
    """Training groups that ended as dead letters, and in no other way."""
    letters = readable(await bus.dead_letters(), DeadLetter)
    named = {letter.group_id for letter in letters if letter.group_id and letter.queue in _TRAINING}
    return [await is_done(bus, group) for group in named if _is_group(group)].count(False)


def _is_group(text: str) -> bool:
    """Whether a stranger's text can be a group's id, and so a key."""
    try:
        TypeAdapter(GroupId).validate_python(text)
    except ValidationError:
        return False
    return True


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
    dropped = status["groups_dropped"]
    reasons = f" ({', '.join(f'{count} {reason}' for reason, count in dropped.items())})" if dropped else ""
    flight = ", ".join(f"{queue} {count}" for queue, count in status["in_flight"].items())
    missing = status["groups_missing"]
    remark = f", and {missing} not accounted for" if missing > 0 else ""
    remark = f", {-missing} of them counted twice on their way" if missing < 0 else remark
    groups = (
        f"{status['groups_issued']} issued = {status['groups_trained']} trained"
        f" + {sum(dropped.values())} dropped{reasons} + {status['groups_dead']} dead"
        f" + {sum(status['in_flight'].values())} in flight{remark}"
    )
    return [
        f"run {status['run']}: version {status['version']:g} of {status['updates_wanted']}, {state}",
        f"groups: {groups}",
        f"in flight: {flight}",
        f"peers: {len(status['peers']) or 'nobody'}",
        *(_peer_line(peer) for peer in status["peers"]),
    ]


def _peer_line(peer: dict[str, Any]) -> str:
    roles = one_line("+".join(peer["roles"]))
    where = f"up {peer['up_s']} s on {one_line(peer['host'])}"
    return f"  {peer['node']:<16} {roles:<18} at {peer['clock']:<20} busy {peer['busy']:<4} {where}"
