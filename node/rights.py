"""What each role may do at the broker: the one table, from which accounts are made.

Streams lie in the CORE account. A node has an account of its own, which imports the subjects listed here and
nothing else; whatever it publishes besides reaches nobody. Requests are subjects, too: reading a key is
publishing to ``$JS.API.DIRECT.GET.…``. Answers come back by themselves.

    learner ──task.<self>──▶ CORE ──samplers──▶ sampler ──rollout.<self>──▶ CORE ──verifiers──▶ verifier
       ▲                                                                                            │
       └──────────────────────────learners──────────── CORE ◀──verified.<self>──────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from node.broker_access import imported
from node.nats_blob import slots
from node.nats_jwt import Export, Import
from protocol.limits import PROTOCOL_VERSION
from protocol.subjects import (
    DONE,
    FINISHED_KEY,
    GENESIS_KEY,
    HEADS,
    SPEC_KEY,
    STANDINGS,
    Bucket,
    Names,
    Queue,
    cursor_key,
    node_key,
)

CORE = "CORE"
"""The account that has the streams, and the name under which the others import them."""

_API = "$JS.API"
_GRPO = f"grpo.v{PROTOCOL_VERSION}"

EXPORTS = (
    Export(f"{_API}.STREAM.INFO.*"),
    Export(f"{_API}.CONSUMER.INFO.*.*"),
    Export(f"{_API}.CONSUMER.MSG.NEXT.*.*", many=True),
    Export(f"{_API}.DIRECT.GET.*", many=True),
    Export(f"{_API}.DIRECT.GET.*.>"),
    Export("$JS.ACK.*.*.>"),
    Export("$KV.*.>"),
    Export("$O.*.C.*.*"),
    Export("$O.*.C.*"),
    Export("$O.*.M.*"),
    Export(f"{_GRPO}.*.>"),
    Export(f"{_GRPO}.*.announce.*", stream=True),
)
"""What CORE lets itself be asked at all: nothing here creates, purges or deletes a stream or a consumer. Only
the operator's key makes accounts, so the imports below decide who is let in to what."""


def imports(run: str, roles: Sequence[str], node: str) -> list[Import]:
    """What the account of ``node`` imports to play ``roles`` in ``run``; each subject once, sorted."""
    names = Names(run)
    wanted = {*_any_peer(names, node)}
    for role in roles:
        wanted |= {names.event_subject(role, node), *_ROLES[role](names, node)}
    wide = [each for each in wanted if ".*" in each]
    wanted = {each for each in wanted if not any(each != wider and _covers(wider, each) for wider in wide)}
    heard = names.announce_subject("*")
    services = [Import(subject, imported(subject, CORE)) for subject in sorted(wanted)]
    return [*services, Import(heard, heard, stream=True)]


def _covers(pattern: str, subject: str) -> bool:
    """Whether a subject of as many tokens is ``pattern``'s; no claim may import one twice."""
    if pattern.count(".") != subject.count("."):
        return False
    return all(p in ("*", s) for p, s in zip(pattern.split("."), subject.split("."), strict=True))


def _any_peer(names: Names, node: str) -> Iterator[str]:
    """Find the run, its adapters and judgements; be present, see who else is, tell, and bury."""
    yield f"{_API}.STREAM.INFO.{names.kv_stream(Bucket.RUN)}"
    for key in (SPEC_KEY, FINISHED_KEY):
        yield _key_read(names, Bucket.RUN, key)
    yield f"{_API}.DIRECT.GET.{names.kv_stream(Bucket.RUN)}"
    for subjects in ("", f".$O.{names.adapter_bucket}.>"):
        yield f"{_API}.DIRECT.GET.{names.adapter_stream}{subjects}"
    yield names.kv_subject(Bucket.NODE, node_key(node))
    yield f"{_API}.DIRECT.GET.{names.kv_stream(Bucket.NODE)}"
    yield names.event_subject("node", node)
    yield names.dead_subject(node)


def _follow(names: Names) -> Iterator[str]:
    """Know the genesis, and every head at once."""
    yield _key_read(names, Bucket.RUN, GENESIS_KEY)
    yield f"{_API}.DIRECT.GET.{names.kv_stream(Bucket.POLICY)}"


def _learner(names: Names, node: str) -> Iterator[str]:
    yield from _follow(names)
    for queue, twin in ((Queue.TASK, Queue.VERIFIED), (Queue.EVAL_TASK, Queue.EVAL_VERIFIED)):
        yield from _give(names, queue, node)
        yield from _take(names, twin)
        yield names.blob_subject(twin, "*", "*")  # removes what it has trained on
    for queue in Queue:
        yield f"{_API}.CONSUMER.INFO.{names.stream(queue)}.{names.consumer(queue)}"  # depth, for admission
    # Its own head; another's is signed by its author, and told to a broker that lost it (witness.py).
    for key in (f"{HEADS}.*", f"{DONE}.>"):
        yield names.kv_subject(Bucket.POLICY, key)
        yield _key_read(names, Bucket.POLICY, key)
    yield f"{_API}.STREAM.INFO.{names.kv_stream(Bucket.POLICY)}"  # to list more keys than one answer holds
    for key in (GENESIS_KEY, FINISHED_KEY, cursor_key(node)):
        yield names.kv_subject(Bucket.RUN, key)
    yield _key_read(names, Bucket.RUN, cursor_key(node))
    yield f"{_API}.DIRECT.GET.{names.dead_stream}"
    # Adapters, where the broker holds them; a store is one place that all learners write.
    for part in ("C", "M"):
        yield f"$O.{names.adapter_bucket}.{part}.*"
    yield f"{_API}.STREAM.INFO.{names.adapter_stream}"


def _sampler(names: Names, node: str) -> Iterator[str]:
    yield from _follow(names)
    for queue, result in ((Queue.TASK, Queue.ROLLOUT), (Queue.EVAL_TASK, Queue.EVAL_ROLLOUT)):
        yield from _take(names, queue)
        yield from _give(names, result, node)


def _verifier(names: Names, node: str) -> Iterator[str]:
    yield from _follow(names)  # audits recompute under the claimed policy
    yield names.kv_subject(Bucket.RUN, f"{STANDINGS}.*")
    yield _key_read(names, Bucket.RUN, f"{STANDINGS}.*")
    for queue, result in ((Queue.ROLLOUT, Queue.VERIFIED), (Queue.EVAL_ROLLOUT, Queue.EVAL_VERIFIED)):
        yield from _take(names, queue)
        yield from _give(names, result, node)
        yield names.blob_subject(queue, "*", "*")  # removes what it has passed on


_ROLES: dict[str, Callable[[Names, str], Iterator[str]]] = {
    "learner": _learner,
    "sampler": _sampler,
    "verifier": _verifier,
}


def _give(names: Names, queue: Queue, node: str) -> Iterator[str]:
    """Publish into a queue as itself, a large payload by reference."""
    yield names.subject(queue, node)
    for slot in slots(queue) or "*":
        yield names.blob_subject(queue, node, slot)


def _take(names: Names, queue: Queue) -> Iterator[str]:
    """Pull from a queue, settle what was pulled, read large payloads."""
    stream, consumer = names.stream(queue), names.consumer(queue)
    yield f"{_API}.CONSUMER.INFO.{stream}.{consumer}"
    yield f"{_API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
    yield f"$JS.ACK.{stream}.{consumer}.>"
    yield f"{_API}.DIRECT.GET.{stream}"  # whether a message whose payload is gone was settled
    yield f"{_API}.DIRECT.GET.{names.blob_stream(queue)}"


def _key_read(names: Names, bucket: Bucket, key: str) -> str:
    return f"{_API}.DIRECT.GET.{names.kv_stream(bucket)}.{names.kv_subject(bucket, key)}"
