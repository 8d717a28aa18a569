"""The run's key-value buckets on raw streams: direct gets, compare-and-set, and atomic commits.

The subjects and headers are those of NATS KV, so ``nats kv`` reads these buckets; nats-py's own KV
layer is not used because its ``get``, ``create`` and ``keys`` err around expired and deleted keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from nats.aio.msg import Msg
from nats.nuid import NUID

from node.bus_checks import check_commit, check_key, check_prefix, check_write
from node.bus_rules import MARKER_S, write_headers
from node.nats_answers import sequence
from node.nats_batch import store_all
from node.nats_link import Link
from node.nats_newest import newest
from protocol.errors import WrongRevision
from protocol.ports import Entry, Write
from protocol.subjects import Bucket, Names


class Kv:
    """The buckets of one run."""

    def __init__(self, link: Link, names: Names) -> None:
        self._link = link
        self._names = names
        self._ids = NUID()

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        """Newest value, or None."""
        check_key(key)
        msg = await self._last(bucket, key)
        return None if msg is None or is_deletion(msg) else Entry(key, msg.data, sequence(msg))

    async def below(self, bucket: Bucket, prefix: str) -> dict[str, Entry]:
        """All live keys below ``prefix``, sorted."""
        check_prefix(prefix)
        root = self._names.kv_subject(bucket, "")
        pattern = f"{root}{prefix}.>" if prefix else f"{root}>"
        messages = await newest(self._link, self._names.kv_stream(bucket), [pattern])
        found = {}
        for msg in messages:
            key = (msg.headers or {})["Nats-Subject"].removeprefix(root)
            if not is_deletion(msg):
                found[key] = Entry(key, msg.data, sequence(msg))
        return dict(sorted(found.items()))

    async def put(self, bucket: Bucket, write: Write) -> int:
        """One write; returns its revision."""
        check_write(write)
        try:
            return await self._store(bucket, write, write.expected)
        except WrongRevision:
            # A deleted key is absent for our callers, but its marker has a revision.
            marker = await self._last(bucket, write.key) if write.expected == 0 else None
            if marker is None or not is_deletion(marker):
                raise
            return await self._store(bucket, write, sequence(marker))

    async def delete(self, bucket: Bucket, key: str) -> None:
        """Leave a marker that expires after ``MARKER_S``, and nothing else."""
        check_key(key)
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-TTL": f"{MARKER_S}s"}
        await self._link.store(self._names.kv_subject(bucket, key), b"", headers)

    async def commit(self, bucket: Bucket, writes: Sequence[Write]) -> int:
        """An atomic batch (nats-server 2.12): all writes or none; returns the last one's revision.

        Until the last message nothing can take effect, so failures before it raise BrokerAbsent.
        """
        check_commit(writes)
        if len(writes) == 1:
            return await self.put(bucket, writes[0])
        return await store_all(self._link, self._names.kv_subject(bucket, ""), writes, self._ids)

    async def _store(self, bucket: Bucket, write: Write, expected: int | None) -> int:
        subject = self._names.kv_subject(bucket, write.key)
        answer = await self._link.store(subject, write.value, write_headers(write, expected) or None)
        return int(answer["seq"])

    async def _last(self, bucket: Bucket, key: str) -> Msg | None:
        return await self._link.read_last(self._names.kv_stream(bucket), self._names.kv_subject(bucket, key))


def is_deletion(msg: Msg) -> bool:
    """Whether a stored message says that its key is gone."""
    headers = msg.headers or {}
    return "KV-Operation" in headers or "Nats-Marker-Reason" in headers
