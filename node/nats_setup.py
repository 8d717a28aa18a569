"""What a run needs on the broker: work queues with their consumers, KV buckets, telemetry, blobs.

Created once by whoever has the right to; every other node only uses it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from node.bus_rules import HEADERS_MAX, HISTORY, NODE_AGE_S
from node.nats_blob import CHUNKS_MAX
from node.nats_chunks import CHUNK_BYTES
from node.nats_link import Link
from protocol.errors import BackPressure, BusError, OperatorError
from protocol.limits import DEDUPE_WINDOW_S, NODE_BYTES_MAX, QUEUE_MESSAGES_MAX, SAMPLER_MESSAGES_MAX
from protocol.runspec import RunSpec
from protocol.subjects import TRAINING, Bucket, Names, Queue

DAY_S = 24 * 3600
EVENT_AGE_S = DAY_S
EVENT_BYTES_KEPT = 32 << 20
DEAD_AGE_S = 7 * DAY_S
DEAD_BYTES_KEPT = 16 << 20
BLOB_AGE_S = 7 * DAY_S
"""Payloads are removed when acknowledged; this catches those whose message was never stored."""
UNACKNOWLEDGED_MAX = 100_000
WAITING_MAX = 4096
"""Outstanding pull requests of one queue: one a taker."""
_ROLLOUTS = (Queue.ROLLOUT, Queue.EVAL_ROLLOUT)
_ALREADY_DIFFERENT = "(10058)"


def stream_configs(names: Names, queue_messages_max: int = QUEUE_MESSAGES_MAX) -> list[dict[str, Any]]:
    """Every stream of a run. Unlisted settings are the server's defaults.

    Sequences begin later than in any earlier life of the run on a broker that has lost its disk since: old
    acknowledgements, revisions and read positions name messages by sequence, and must not meet new ones.
    """
    first_sequence = time.time_ns() // 1000
    streams = [_queue(names, queue, queue_messages_max, first_sequence) for queue in Queue]
    streams += [_bucket(names, bucket, first_sequence) for bucket in Bucket]
    streams += [
        _kept(names.dead_stream, names.dead_subject("*"), DEAD_AGE_S, DEAD_BYTES_KEPT),
        _kept(names.event_stream, names.event_subject("*", "*"), EVENT_AGE_S, EVENT_BYTES_KEPT)
        | {"first_seq": first_sequence},
        *(_blobs(names, queue) for queue in TRAINING),
    ]
    return [{"storage": "file", "num_replicas": 1, **stream} for stream in streams]


def consumer_config(names: Names, queue: Queue, ack_wait_s: float) -> dict[str, Any]:
    """The one durable consumer of a queue. Nodes count deliveries themselves and bury what exceeds them."""
    return {
        "durable_name": names.consumer(queue),
        "ack_policy": "explicit",
        "ack_wait": _ns(ack_wait_s),
        "max_deliver": -1,
        "max_ack_pending": UNACKNOWLEDGED_MAX,
        "max_waiting": WAITING_MAX,
    }


async def create_streams(link: Link, spec: RunSpec, queue_messages_max: int) -> None:
    """Create or bring up to date all that ``spec`` needs. Raises OperatorError, BusError."""
    names = Names(spec.name)
    configs = stream_configs(names, queue_messages_max)
    try:
        await asyncio.gather(*(_create(link, config) for config in configs))
        await asyncio.gather(
            *(_create_consumer(link, names, queue, spec.sampling.ack_wait_s) for queue in Queue)
        )
    except BackPressure as exc:
        raise OperatorError(
            f"the broker has no room for run {spec.name}: {exc}; delete old runs or raise its max_file_store"
        ) from exc


async def _create(link: Link, config: dict[str, Any]) -> None:
    try:
        await link.api(f"STREAM.CREATE.{config['name']}", config)
    except BusError as exc:
        if _ALREADY_DIFFERENT not in str(exc):
            raise
        update = {key: value for key, value in config.items() if key != "first_seq"}
        await link.api(f"STREAM.UPDATE.{config['name']}", update)


async def _create_consumer(link: Link, names: Names, queue: Queue, ack_wait_s: float) -> None:
    stream, consumer = names.stream(queue), names.consumer(queue)
    body = {"stream_name": stream, "config": consumer_config(names, queue, ack_wait_s)}
    await link.api(f"CONSUMER.DURABLE.CREATE.{stream}.{consumer}", body)


def _queue(names: Names, queue: Queue, messages_max: int, first_sequence: int) -> dict[str, Any]:
    return {
        "name": names.stream(queue),
        "subjects": [names.subject(queue, "*")],
        "retention": "workqueue",
        "discard": "new",
        "max_msgs": messages_max,
        # One sampler's flood fills its own part of the queue, and nobody else's.
        "max_msgs_per_subject": min(messages_max, SAMPLER_MESSAGES_MAX) if queue in _ROLLOUTS else -1,
        "discard_new_per_subject": queue in _ROLLOUTS,
        "duplicate_window": _ns(DEDUPE_WINDOW_S),
        "allow_direct": True,
        "first_seq": first_sequence,
    }


def _bucket(names: Names, bucket: Bucket, first_sequence: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "name": names.kv_stream(bucket),
        "subjects": [names.kv_subject(bucket, ">")],
        "max_msgs_per_subject": HISTORY[bucket],
        "discard": "new",
        "deny_delete": True,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_atomic": bucket is not Bucket.NODE,
        "allow_msg_ttl": True,
        "first_seq": first_sequence,
    }
    if bucket is Bucket.NODE:
        # Whoever wants to seem alive for ever must come back, and presence is small.
        config |= {"max_age": _ns(NODE_AGE_S), "max_msg_size": NODE_BYTES_MAX + HEADERS_MAX}
    if bucket is Bucket.POLICY:
        config["republish"] = {
            "src": names.kv_subject(bucket, "head.>"),
            "dest": names.announce_subject(">"),
        }
    return config


def _blobs(names: Names, queue: Queue) -> dict[str, Any]:
    return {
        "name": names.blob_stream(queue),
        "subjects": [names.blob_subject(queue, "*", "*")],
        "discard": "new",
        "max_msgs_per_subject": CHUNKS_MAX,
        "discard_new_per_subject": True,
        "max_msg_size": CHUNK_BYTES + HEADERS_MAX,
        "max_age": _ns(BLOB_AGE_S),
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
    }


def _kept(name: str, subject: str, age_s: float, bytes_kept: int) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": [subject],
        "max_age": _ns(age_s),
        "max_bytes": bytes_kept,
        "discard": "old",
        "allow_direct": True,
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
