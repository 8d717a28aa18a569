"""The run's key-value buckets on raw streams: direct gets, compare-and-set, and atomic commits.

The subjects and headers are those of NATS KV, so ``nats kv`` reads these buckets; nats-py's own KV
layer is not used because its ``get``, ``create`` and ``keys`` err around expired and deleted keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from nats.aio.msg import Msg
from nats.nuid import NUID

from node.bus_checks import check_commit, check_key, check_prefix, check_write
from node.bus_rules import MARKER_S, batch_headers, write_headers
from node.nats_answers import TOO_MANY, answer_json, pending, sequence, status
from node.nats_link import Link
from protocol.errors import BrokerAbsent, BusError, UnknownOutcome, WrongRevision
from protocol.ports import Entry, Write
from protocol.subjects import Bucket, Names

SUBJECTS_PER_READ = 512
"""The server refuses to answer a direct get of more than 1024 subjects."""


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
        messages = await self._newest(bucket, [f"{root}{prefix}.>" if prefix else f"{root}>"])
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
        batch = self._ids.next().decode()
        messages = [
            (self._names.kv_subject(bucket, write.key), write.value, headers)
            for write, headers in zip(writes, batch_headers(batch, writes), strict=True)
        ]
        for _, data, headers in messages:
            self._link.check_size(data, headers)
        try:
            await self._open_batch(*messages[0])
            for subject, data, headers in messages[1:-1]:
                await self._link.send(subject, data, headers=headers)
        except UnknownOutcome as exc:
            raise BrokerAbsent("a commit could not begin") from exc
        return int((await self._link.store(*messages[-1]))["seq"])

    async def _open_batch(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        answer = await self._link.request(subject, data, headers)
        if answer.data:  # a batch that was opened is answered with an empty message
            answer_json(answer)
            raise BusError(f"{subject} does not take atomic batches; create the run again")

    async def _store(self, bucket: Bucket, write: Write, expected: int | None) -> int:
        subject = self._names.kv_subject(bucket, write.key)
        answer = await self._link.store(subject, write.value, write_headers(write, expected) or None)
        return int(answer["seq"])

    async def _last(self, bucket: Bucket, key: str) -> Msg | None:
        return await self._link.read_last(self._names.kv_stream(bucket), self._names.kv_subject(bucket, key))

    async def _newest(self, bucket: Bucket, subjects: Sequence[str]) -> list[Msg]:
        """Newest message of each subject that matches, deletion markers included."""
        stream, first = self._names.kv_stream(bucket), 1
        found: list[Msg] = []
        while True:
            page = await self._link.read_many(stream, {"multi_last": list(subjects), "seq": first})
            if status(page[-1]) == TOO_MANY:
                return await self._newest_in_parts(bucket, subjects[0])
            found += page[:-1]
            if len(page) == 1 or pending(page[-1]) == 0:
                return found
            first = sequence(page[-2]) + 1

    async def _newest_in_parts(self, bucket: Bucket, pattern: str) -> list[Msg]:
        stream = self._names.kv_stream(bucket)
        found: list[Msg] = []
        subjects: list[str] = []
        while True:
            query = {"subjects_filter": pattern, "offset": len(subjects)}
            info = await self._link.read_api(f"STREAM.INFO.{stream}", query)
            page = info["state"].get("subjects") or {}
            subjects += sorted(page)
            if not page or len(subjects) >= info.get("total", 0):
                break
        for start in range(0, len(subjects), SUBJECTS_PER_READ):
            found += await self._newest(bucket, subjects[start : start + SUBJECTS_PER_READ])
        return found


def is_deletion(msg: Msg) -> bool:
    """Whether a stored message says that its key is gone."""
    headers = msg.headers or {}
    return "KV-Operation" in headers or "Nats-Marker-Reason" in headers
