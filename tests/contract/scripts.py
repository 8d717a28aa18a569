"""Scripts for a broker: seeded ones for its queues and for its keys, and a few stories.

A step is a method of ``player.Player`` and its arguments.
"""

from __future__ import annotations

import random

from protocol.subjects import Bucket

NODES = ("node-1", "node-2")
ACK_WAIT_S = 1.5
NAP_S = 0.9
"""Two naps are longer than ack_wait, and neither one nor two end near a multiple of it."""
TTL_S = 2
EXPIRY_S = 3.4
"""By then a key with that TTL is gone: a real broker takes up to a third of a second longer."""
MESSAGES_MAX = 6
KEYS = ("head.a", "head.b", "head.a.deep", "done.1", "done.2", "other")

Step = tuple[str, tuple[object, ...]]

STORIES: dict[str, list[Step]] = {
    "idle-takers-get-messages-in-turn": [
        *(step for node in NODES for step in (("consume", (node, 4)), ("next", (node,)))),
        *(("publish", (NODES[0], f"m{number}")) for number in range(4)),
        *(("next", (node,)) for node in NODES for _ in range(2)),
    ],
    "a-sign-of-life-comes-too-late-after-a-release": [
        ("consume", (NODES[0], 1)),
        ("publish", (NODES[0], "m1")),
        ("next", (NODES[0],)),
        ("close", (NODES[0],)),
        ("release", (0.0,)),
        ("alive", (0.0,)),
        ("consume", (NODES[1], 1)),
        ("next", (NODES[1],)),
    ],
    "a-released-message-goes-before-new-ones": [
        ("consume", (NODES[0], 1)),
        ("publish", (NODES[0], "m1")),
        ("next", (NODES[0],)),
        ("close", (NODES[0],)),
        ("release", (0.0,)),
        ("publish", (NODES[0], "m2")),
        ("consume", (NODES[1], 2)),
        ("next", (NODES[1],)),
        ("next", (NODES[1],)),
    ],
}


def queue_script(seed: int) -> list[Step]:
    """Three acts on one queue, with a nap after the first two."""
    rng = random.Random(f"queue/{seed}")
    steps: list[Step] = [("consume", (NODES[0], rng.choice((1, 2, 4))))]
    fresh = 0
    for act in range(3):
        for _ in range(rng.randint(7, 12)):
            kind = rng.choices(
                (
                    "publish",
                    "again",
                    "next",
                    "ack",
                    "release",
                    "delay",
                    "reject",
                    "alive",
                    "consume",
                    "close",
                ),
                (6, 1, 6, 4, 2, 1, 1, 2, 1, 0.4),
            )[0]
            node, which = rng.choice(NODES), rng.random()
            if kind == "publish":
                fresh += 1
                steps.append(("publish", (node, f"m{fresh}")))
            elif kind == "again":
                steps.append(("publish", (node, f"m{rng.randint(1, max(1, fresh))}")))
            elif kind == "consume":
                steps.append((kind, (node, rng.choice((1, 2, 4)))))
            elif kind in ("next", "close"):
                steps.append((kind, (node,)))
            else:
                steps.append((kind, (which,)))
        if act < 2:
            steps += [("nap", (NAP_S,)), ("drain", ())]
    return steps


def key_script(seed: int) -> list[Step]:
    """Two acts on the buckets; between them everything short-lived expires."""
    rng = random.Random(f"keys/{seed}")

    def write() -> tuple[str, str, int | None]:
        return (
            rng.choice(KEYS),
            rng.choices(("any", "absent", "current", "stale"), (3, 3, 3, 1))[0],
            rng.choices((None, TTL_S, 3600), (4, 2, 1))[0],
        )

    steps: list[Step] = []
    for act in range(2):
        for _ in range(25):
            bucket = rng.choices((Bucket.POLICY, Bucket.NODE), (3, 1))[0]
            kind = rng.choices(("put", "commit", "delete", "get", "list", "large"), (6, 5, 2, 3, 2, 0.3))[0]
            if kind == "commit":
                writes = {w[0]: w for w in (write() for _ in range(rng.randint(2, 4)))}
                steps.append((kind, (bucket, tuple(writes.values()))))
            elif kind in ("put", "large"):
                steps.append((kind, (bucket, write())))
            elif kind == "list":
                steps.append((kind, (bucket, rng.choice(("", "head", "done", "head.a", "none")))))
            else:
                steps.append((kind, (bucket, rng.choice(KEYS))))
        steps += [("list", (bucket, "")) for bucket in Bucket]
        if act == 0:
            steps.append(("nap", (EXPIRY_S,)))
    return [*steps, *(("list", (bucket, "")) for bucket in Bucket)]
