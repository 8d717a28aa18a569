"""What every Bus refuses before it does anything: our own bugs are ValueErrors, sizes are MessageTooLarge."""

from __future__ import annotations

import re
from collections.abc import Sequence

from protocol.errors import MessageTooLarge
from protocol.limits import BATCH_WRITES_MAX, EVENT_BYTES_MAX, FRAME_BYTES_MAX
from protocol.ports import Write

_TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
_MESSAGE_ID = re.compile(r"[!-~]{1,256}")


def check_key(key: str) -> None:
    """A key is subject tokens joined by dots: no wildcards, no spaces, no empty token."""
    if not all(_TOKEN.fullmatch(token) for token in key.split(".")):
        raise ValueError(f"not a key: {key!r}")


def check_prefix(prefix: str) -> None:
    """A prefix is a key, or empty for everything."""
    if prefix:
        check_key(prefix)


def check_write(write: Write) -> None:
    """One write of a put or a commit."""
    check_key(write.key)
    if write.expected is not None and write.expected < 0:
        raise ValueError(f"{write.key}: expected revision {write.expected}")
    if write.ttl_s is not None and write.ttl_s < 1:
        raise ValueError(f"{write.key}: a TTL is at least one second")


def check_commit(writes: Sequence[Write]) -> None:
    """A commit has between 1 and ``BATCH_WRITES_MAX`` writes of different keys."""
    if not writes:
        raise ValueError("an empty commit")
    if len(writes) > BATCH_WRITES_MAX:
        raise MessageTooLarge(f"{len(writes)} writes in one commit; the limit is {BATCH_WRITES_MAX}")
    if len({write.key for write in writes}) != len(writes):
        raise ValueError("a commit writes each key once")
    for write in writes:
        check_write(write)


def check_message(data: bytes, message_id: str) -> None:
    """A queue message, before it is stored inline or by reference."""
    if not _MESSAGE_ID.fullmatch(message_id):
        raise ValueError(f"not a message id: {message_id!r}")
    if len(data) > FRAME_BYTES_MAX:
        raise MessageTooLarge(f"a message of {len(data)} bytes; the limit is {FRAME_BYTES_MAX}")


def check_event(data: bytes) -> None:
    """A telemetry frame."""
    if len(data) > EVENT_BYTES_MAX:
        raise MessageTooLarge(f"an event of {len(data)} bytes; the limit is {EVENT_BYTES_MAX}")


def check_credit(credit: int) -> None:
    """At least one delivery at a time."""
    if credit < 1:
        raise ValueError(f"credit {credit}")
