"""Names on the broker: subjects, streams, consumers, buckets and keys of one run."""

from __future__ import annotations

from enum import StrEnum

from protocol.limits import PROTOCOL_VERSION


class Queue(StrEnum):
    """Work queues of a run; each is a JetStream work-queue stream with one shared consumer."""

    TASK = "task"
    ROLLOUT = "rollout"
    VERIFIED = "verified"
    EVAL_TASK = "eval.task"
    EVAL_ROLLOUT = "eval.rollout"
    EVAL_VERIFIED = "eval.verified"


class Bucket(StrEnum):
    """Key-value buckets of a run."""

    RUN = "run"
    POLICY = "policy"
    NODE = "node"


TRAINING = (Queue.TASK, Queue.ROLLOUT, Queue.VERIFIED)
"""The queues whose depth is the number of groups in flight."""


class Names:
    """Every broker-side name of run ``run``; the only place that spells them."""

    def __init__(self, run: str) -> None:
        """Bind to one run."""
        self.run = run
        self.root = f"grpo.v{PROTOCOL_VERSION}.{run}"

    def subject(self, queue: Queue, author: str) -> str:
        """Subject of what ``author`` puts into a work queue; ``author`` may be ``*``."""
        return f"{self.root}.{queue.value}.{author}"

    def stream(self, queue: Queue) -> str:
        """Stream of a work queue; stream names must not contain dots."""
        return f"grpo_{self.run}_{queue.value.replace('.', '_')}"

    def consumer(self, queue: Queue) -> str:
        """The durable pull consumer that all takers of a queue share."""
        return {"task": "samplers", "rollout": "verifiers", "verified": "learners"}[_step(queue)]

    def dead_subject(self, author: str) -> str:
        """Where ``author``'s dead letters go; ``author`` may be ``*``."""
        return f"{self.root}.dead.{author}"

    @property
    def dead_stream(self) -> str:
        """Stream that keeps dead letters for a person."""
        return f"grpo_{self.run}_dead"

    def event_subject(self, role: str, node: str) -> str:
        """Subject of a node's telemetry; ``role`` and ``node`` may be ``*``."""
        return f"{self.root}.event.{role}.{node}"

    @property
    def event_stream(self) -> str:
        """Stream that keeps recent telemetry."""
        return f"grpo_{self.run}_event"

    def bucket(self, bucket: Bucket) -> str:
        """Name of a KV bucket."""
        return f"grpo_{self.run}_{bucket.value}"

    def kv_stream(self, bucket: Bucket) -> str:
        """Stream behind a KV bucket."""
        return f"KV_{self.bucket(bucket)}"

    def kv_subject(self, bucket: Bucket, key: str) -> str:
        """Subject of one key."""
        return f"$KV.{self.bucket(bucket)}.{key}"

    def blob_bucket(self, queue: Queue) -> str:
        """Object Store bucket for payloads too large for a message; a queue shares it with its twin for
        evaluation, whose authors and takers are the same peers."""
        return f"grpo_{self.run}_blob_{_step(queue)}"

    def blob_stream(self, queue: Queue) -> str:
        """Stream behind that bucket."""
        return f"OBJ_{self.blob_bucket(queue)}"

    def blob_subject(self, queue: Queue, author: str, slot: str) -> str:
        """Subject of all chunks of one payload; ``author`` and ``slot`` may be ``*``."""
        return f"$O.{self.blob_bucket(queue)}.C.{author}.{slot}"

    @property
    def adapter_bucket(self) -> str:
        """Object Store bucket that is the run's adapter store, where that is ``nats://``."""
        return f"grpo_{self.run}_adapters"

    @property
    def adapter_stream(self) -> str:
        """Stream behind that bucket."""
        return f"OBJ_{self.adapter_bucket}"

    def announce_subject(self, learner: str) -> str:
        """Where the broker republishes committed heads; ``learner`` may be ``*``."""
        return f"{self.root}.announce.{learner}"


def _step(queue: Queue) -> str:
    return queue.value.rpartition(".")[2]


SPEC_KEY = "spec"


HEADS = "head"
"""Prefix of the keys that hold heads."""


def head_key(learner: str) -> str:
    """KV key of a learner's head."""
    return f"{HEADS}.{learner}"


DONE = "done"
"""Prefix of the keys that mark groups as consumed."""


def done_key(group_id: str) -> str:
    """KV key that marks a group as consumed."""
    return f"{DONE}.{group_id}"


def cursor_key(learner: str) -> str:
    """KV key of how many tasks a learner has issued."""
    return f"cursor.{learner}"


def node_key(node: str) -> str:
    """KV key of a node's presence."""
    return f"node.{node}"


STANDINGS = "standing"
"""Prefix of the keys, in the run bucket, that hold what verifiers hold of samplers."""


def standing_key(public_key: str) -> str:
    """KV key of a judged sampler, by the key that it signs with: names are cheap."""
    return f"{STANDINGS}.{public_key}"


GENESIS_KEY = "genesis"
"""KV key in the run bucket: digest and path of the genesis that was claimed."""

RECOVER_KEY = "recover"
"""What the first attempt of ``recover`` found committed: tips by learner, and uncertain uploads, in JSON."""

FINISHED_KEY = "finished"
"""KV key in the run bucket: present once the run reached its last update."""
