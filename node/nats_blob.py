"""Payloads too large for a message: chunks in the run's Object Store bucket, named in a header.

A message by reference has an empty payload and the header ``Grpo-Blob: <id> <size> <sha256>``. Its
chunks are the messages of one subject, ``$O.<bucket>.C.<id>``. Reading is a batch of direct gets,
because nats-py's ObjectStore.get polls. Removing is a roll-up whose marker expires: no peer needs the
right to purge a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass

from nats.nuid import NUID

from node.nats_answers import status
from node.nats_link import Link
from protocol.errors import BusError, MessageTooLarge
from protocol.limits import FRAME_BYTES_MAX

BLOB_HEADER = "Grpo-Blob"
CHUNK_BYTES = 128 << 10
CHUNKS_IN_FLIGHT = 4

_REFERENCE = re.compile(r"([A-Za-z0-9]{22}) (\d{1,9}) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Where a payload lies and what it must be."""

    id: str
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.id} {self.size} {self.sha256}"

    @classmethod
    def parse(cls, text: str) -> BlobRef | None:
        """Read a header that a peer wrote; None if it is not a reference within the limits."""
        match = _REFERENCE.fullmatch(text)
        if match is None or int(match[2]) > FRAME_BYTES_MAX:
            return None
        return cls(match[1], int(match[2]), match[3])


class Blobs:
    """Contents in one Object Store bucket."""

    def __init__(self, link: Link, bucket: str) -> None:
        self._link = link
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._ids = NUID()

    async def put(self, data: bytes) -> BlobRef:
        """Store ``data`` under a new id. Raises BusError and leaves nothing behind if it can."""
        ref = BlobRef(self._ids.next().decode(), len(data), await asyncio.to_thread(_sha256, data))
        subject = self._subject(ref)
        # A chunk leaves room for what the server counts besides the payload.
        step = min(CHUNK_BYTES, self._link.max_payload - 64)
        if step < 1:
            raise MessageTooLarge(
                f"the broker takes {self._link.max_payload} bytes a message; raise its max_payload"
            )
        chunks = [data[start : start + step] for start in range(0, len(data), step)]
        try:
            # Written in order: the sequence in the stream is the order of the bytes.
            for start in range(0, len(chunks), CHUNKS_IN_FLIGHT):
                window = chunks[start : start + CHUNKS_IN_FLIGHT]
                await asyncio.gather(*(self._link.store(subject, chunk) for chunk in window))
        except BusError:
            await self.remove(ref)
            raise
        return ref

    async def get(self, ref: BlobRef) -> bytes | None:
        """The payload, or None if it is gone or not what ``ref`` promises. Raises BrokerAbsent."""
        chunks: list[bytes] = []
        size = 0
        async for _, msg in self._link.walk(self._stream, self._subject(ref)):
            if status(msg) is not None or not msg.data:
                return None
            chunks.append(msg.data)
            size += len(msg.data)
            if size > ref.size:
                return None
        data = b"".join(chunks)
        if len(data) != ref.size or await asyncio.to_thread(_sha256, data) != ref.sha256:
            return None
        return data

    async def remove(self, ref: BlobRef) -> None:
        """Forget a payload; best effort, the bucket's age limit does the same later."""
        headers = {"Nats-Rollup": "sub", "Nats-TTL": "1s"}
        with suppress(BusError):
            await self._link.send(self._subject(ref), headers=headers)

    def _subject(self, ref: BlobRef) -> str:
        return f"$O.{self._bucket}.C.{ref.id}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
