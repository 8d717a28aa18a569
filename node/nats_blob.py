"""Payloads too large for a message: chunks in the run's Object Store buckets, named in a header.

A message by reference has an empty payload and the header ``Grpo-Blob: <slot> <size> <sha256>``. Its
chunks are the messages of one subject, ``$O.<bucket>.C.<author>.<slot>``; the author is that of the
message's own subject, so nobody can refer to another's payload.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from node import nats_chunks
from node.bus_rules import EXPECTED
from node.nats_chunks import CHUNK_BYTES
from node.nats_link import Link
from protocol.errors import BackPressure, MessageTooLarge, WrongRevision
from protocol.limits import FRAME_BYTES_MAX, SAMPLER_PAYLOADS_MAX
from protocol.subjects import TRAINING, Names, Queue

BLOB_HEADER = "Grpo-Blob"
CHUNKS_MAX = FRAME_BYTES_MAX // CHUNK_BYTES + 8
"""Messages of one payload; the broker refuses more."""
SLOT_CHARS = 22

_REFERENCE = re.compile(r"([A-Za-z0-9]{1,22}) (\d{1,9}) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Where a payload lies and what it must be."""

    author: str
    slot: str
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.slot} {self.size} {self.sha256}"

    @classmethod
    def parse(cls, text: str, author: str) -> BlobRef | None:
        """Read a header that peer ``author`` wrote; None if it is not a reference within the limits."""
        match = _REFERENCE.fullmatch(text)
        if match is None or int(match[2]) > FRAME_BYTES_MAX:
            return None
        return cls(author, match[1], int(match[2]), match[3])


def slots(queue: Queue) -> Sequence[str] | None:
    """Where an author may put payloads of this queue; None: anywhere. Samplers are strangers, so their
    share of the broker's disk is bounded by the subjects that exist for them."""
    rollouts = TRAINING[1].value
    return [str(slot) for slot in range(SAMPLER_PAYLOADS_MAX)] if queue.value.endswith(rollouts) else None


class Blobs:
    """The payloads of one queue."""

    def __init__(self, link: Link, names: Names, queue: Queue) -> None:
        self._link = link
        self._names = names
        self._queue = queue

    def example(self, author: str, size: int) -> BlobRef:
        """A reference as long as any, to see whether its message would fit."""
        return BlobRef(author, "x" * SLOT_CHARS, size, "0" * 64)

    async def put(self, data: bytes, author: str) -> BlobRef:
        """Store ``data`` as ``author``. Raises BusError and leaves nothing behind if it can; BackPressure
        when the author's slots are full."""
        chunks = nats_chunks.cut(self._link, data)
        if len(chunks) > CHUNKS_MAX:
            raise MessageTooLarge(
                f"{len(data)} bytes for a broker that takes {self._link.max_payload} a message; "
                "raise its max_payload"
            )
        digest = await nats_chunks.digest(data)
        ref = await self._begin(BlobRef(author, "", len(data), digest), chunks[0])
        await nats_chunks.write(self._link, self._subject(ref), chunks[1:])
        return ref

    async def _begin(self, wanted: BlobRef, chunk: bytes) -> BlobRef:
        """Take a slot that holds nothing, by storing the first chunk there."""
        some = slots(self._queue)
        tries = [secrets.token_hex(SLOT_CHARS // 2)] if some is None else random.sample(some, len(some))
        for slot in tries:
            ref = BlobRef(wanted.author, slot, wanted.size, wanted.sha256)
            try:
                await self._link.store(self._subject(ref), chunk, {EXPECTED: "0"})
            except WrongRevision:
                continue  # a payload that is still wanted, or was removed just now
            return ref
        raise BackPressure(f"{wanted.author} has its share of payloads in the Object Store")

    async def get(self, ref: BlobRef) -> bytes | None:
        """The payload, or None if it is gone or not what ``ref`` promises. Raises BrokerAbsent."""
        stream = self._names.blob_stream(self._queue)
        return await nats_chunks.read(self._link, stream, self._subject(ref), ref.size, ref.sha256)

    async def remove(self, ref: BlobRef) -> None:
        """Forget a payload; best effort, the bucket's age limit does the same later."""
        await nats_chunks.remove(self._link, self._subject(ref))

    def _subject(self, ref: BlobRef) -> str:
        return self._names.blob_subject(self._queue, ref.author, ref.slot)
