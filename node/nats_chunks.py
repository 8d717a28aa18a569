"""Bytes too large for a message: chunks that are the messages of one subject of an Object Store bucket.

Reading is a batch of direct gets, because nats-py's ObjectStore.get polls. Removing is a roll-up whose marker
expires: no peer needs the right to purge a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress

from node.nats_answers import status
from node.nats_link import Link
from protocol.errors import BusError, MessageTooLarge

CHUNK_BYTES = 128 << 10
CHUNKS_IN_FLIGHT = 4


def cut(link: Link, data: bytes) -> list[bytes]:
    """``data`` in chunks that the broker takes. Raises MessageTooLarge."""
    # A chunk leaves room for what the server counts besides the payload.
    step = min(CHUNK_BYTES, link.max_payload - 64)
    if step < 1:
        raise MessageTooLarge(f"the broker takes {link.max_payload} bytes a message; raise its max_payload")
    return [data[start : start + step] for start in range(0, len(data), step)]


async def write(link: Link, subject: str, chunks: Sequence[bytes]) -> None:
    """Store ``chunks`` behind what ``subject`` holds. Raises BusError and leaves nothing there if it can."""
    try:
        # Written in order: the sequence in the stream is the order of the bytes.
        for start in range(0, len(chunks), CHUNKS_IN_FLIGHT):
            window = chunks[start : start + CHUNKS_IN_FLIGHT]
            await asyncio.gather(*(link.store(subject, chunk) for chunk in window))
    except BusError:
        await remove(link, subject)
        raise


async def read(link: Link, stream: str, subject: str, size: int, sha256: str) -> bytes | None:
    """The bytes, or None if they are gone or others than promised. Raises BrokerAbsent."""
    chunks: list[bytes] = []
    found = 0
    async for _, msg in link.walk(stream, subject):
        if status(msg) is not None or not msg.data:
            return None
        chunks.append(msg.data)
        found += len(msg.data)
        if found > size:
            return None
    data = b"".join(chunks)
    return data if found == size and await digest(data) == sha256 else None


async def remove(link: Link, subject: str) -> None:
    """Forget the bytes of ``subject``; best effort."""
    headers = {"Nats-Rollup": "sub", "Nats-TTL": "1s"}
    with suppress(BusError):
        await link.send(subject, headers=headers)


async def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal, off the loop."""
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
