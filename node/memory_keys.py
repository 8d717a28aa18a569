"""A key-value bucket in memory: revisions, compare-and-set, expiry and deletion markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.bus_rules import MARKER_S, batch_headers, message_bytes, write_headers
from protocol.errors import BusError, MessageTooLarge, WrongRevision
from protocol.ports import Clock, Entry, Write

PAYLOAD_BYTES_MAX = 1 << 20
"""Largest message, headers included, as nats-server's default."""
_BATCH = "x" * 22


@dataclass(frozen=True, slots=True)
class KeyRules:
    """What a bucket takes."""

    message_bytes_max: int = PAYLOAD_BYTES_MAX
    """Of a value with its headers."""
    age_s: float | None = None
    """After which every value expires, whatever its own time."""
    atomic: bool = True
    """Several keys in one commit."""


@dataclass(frozen=True, slots=True)
class Value:
    """One revision of a key."""

    data: bytes
    revision: int
    expires_at: float | None
    deleted: bool = False


_ANY = KeyRules()


class MemoryKeys:
    """Keys with revisions from one counter."""

    def __init__(
        self,
        clock: Clock,
        on_write: Callable[[Entry], None],
        history: int = 8,
        first: int = 1,
        rules: KeyRules = _ANY,
    ) -> None:
        """Keep ``history`` revisions of each key; the first revision is ``first``."""
        self._rules = rules
        self._clock = clock
        self._on_write = on_write
        self._history = history
        self._revision = first - 1
        self._values: dict[str, list[Value]] = {}

    def get(self, key: str) -> Entry | None:
        """Newest value, or None if absent, deleted or expired."""
        value = self._newest(key)
        return None if value is None or value.deleted else Entry(key, value.data, value.revision)

    def below(self, prefix: str) -> dict[str, Entry]:
        """All live keys below ``prefix``, sorted."""
        keys = sorted(key for key in self._values if not prefix or key.startswith(f"{prefix}."))
        return {key: entry for key in keys if (entry := self.get(key)) is not None}

    def write(self, writes: Sequence[Write]) -> int:
        """All or none; raises WrongRevision, MessageTooLarge, BusError."""
        alone = len(writes) == 1
        headers = [write_headers(writes[0], writes[0].expected)] if alone else batch_headers(_BATCH, writes)
        for write, fields in zip(writes, headers, strict=True):
            if (size := message_bytes(write.value, fields)) > PAYLOAD_BYTES_MAX:
                raise MessageTooLarge(f"{write.key}: {size} bytes with headers")
        if not alone and not self._rules.atomic:
            raise BusError("this bucket does not take atomic batches")
        if alone and message_bytes(writes[0].value, headers[0]) > self._rules.message_bytes_max:
            raise MessageTooLarge(f"{writes[0].key}: larger than this bucket takes")
        for write in writes:
            self._check(write, alone=alone)
        now = self._clock.monotonic()
        for write in writes:
            self._revision += 1
            times = [now + seconds for seconds in (write.ttl_s, self._rules.age_s) if seconds is not None]
            expires_at = min(times, default=None)
            values = self._values.setdefault(write.key, [])
            values.append(Value(write.value, self._revision, expires_at))
            del values[: -self._history]
            self._on_write(Entry(write.key, write.value, self._revision))
        return self._revision

    def delete(self, key: str) -> None:
        """Leave a marker and nothing else; it has a revision and expires."""
        self._revision += 1
        marker = Value(b"", self._revision, self._clock.monotonic() + MARKER_S, deleted=True)
        self._values[key] = [marker]

    def lose(self) -> None:
        """Every key is gone without a marker, as with the disk; revisions go on."""
        self._values.clear()

    def _newest(self, key: str) -> Value | None:
        now = self._clock.monotonic()
        values = [v for v in self._values.get(key, ()) if v.expires_at is None or v.expires_at > now]
        if not values:
            self._values.pop(key, None)
            return None
        self._values[key] = values
        return values[-1]

    def _check(self, write: Write, *, alone: bool) -> None:
        value = self._newest(write.key)
        revision = 0 if value is None else value.revision
        if write.expected is None or write.expected == revision:
            return
        if alone and write.expected == 0 and value is not None and value.deleted:
            return  # a marker is absence for a single write
        raise WrongRevision(f"{write.key}: wrong last revision: {revision}")
