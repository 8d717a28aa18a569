"""What both buses must do alike: how a taker asks, how keys are kept, and what a message weighs.

The in-memory bus stands for nats-server in every simulation, so these rules have one home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protocol.ports import Write
from protocol.subjects import Bucket

ACK_RETRY_S = 0.5
ACK_TRIES = 10
"""A killed broker may come back without knowing that it handed a message out; it ignores the
acknowledgement until it has handed the message out again, so an acknowledgement is repeated."""

HISTORY = {Bucket.RUN: 8, Bucket.POLICY: 8, Bucket.NODE: 1}
"""Revisions kept per key: an older one reappears when a newer one expires. Presence keeps one."""
NODE_AGE_S = 60
"""Presence expires by its own TTL, set by its author; this holds for an author who sets none."""
HEADERS_MAX = 1 << 10
"""Bytes of headers beside the largest payload of a stream."""
MARKER_S = 1
"""A deleted key leaves a marker for so long. It has a revision, which a commit with ``expected`` 0 meets."""
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
HEADER_FRAME_BYTES = len(b"NATS/1.0\r\n") + len(b"\r\n")


def to_ask(credit: int, unsettled: int, ready: int) -> int:
    """How many messages a taker with nothing on order asks for; ``ready`` of the unsettled wait for it.

    Asking for one at a time costs a round trip a message, so it waits for half the credit while it has
    work.
    """
    room = credit - unsettled
    return room if room > 0 and (ready == 0 or 2 * room >= credit) else 0


def message_bytes(data: bytes, headers: Mapping[str, str] | None) -> int:
    """What the server counts against ``max_payload``: payload and encoded headers."""
    if not headers:
        return len(data)
    fields = sum(len(key.encode()) + len(value.encode()) + len(b": \r\n") for key, value in headers.items())
    return len(data) + HEADER_FRAME_BYTES + fields


def write_headers(write: Write, expected: int | None) -> dict[str, str]:
    """Headers of one write with this expected revision."""
    headers = {}
    if expected is not None:
        headers[EXPECTED] = str(expected)
    if write.ttl_s is not None:
        headers["Nats-TTL"] = f"{write.ttl_s}s"
    return headers


def batch_headers(batch: str, writes: Sequence[Write]) -> list[dict[str, str]]:
    """Headers of all writes of an atomic commit (nats-server 2.12)."""
    headers = [
        {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)} | write_headers(write, write.expected)
        for number, write in enumerate(writes, 1)
    ]
    headers[-1]["Nats-Batch-Commit"] = "1"
    return headers
