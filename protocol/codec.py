"""Frames: a small JSON envelope, a JSON body, raw little-endian arrays, and an Ed25519 signature.

    4 bytes  magic ``GRPO``
    1 byte   protocol version
    4 bytes  envelope length E, little-endian
    4 bytes  body length B, little-endian
    E bytes  envelope: {"kind", "signer", "arrays": [[dtype, length], …]}
    B bytes  body: the message, in which the value of the k-th array field is {"$": k}
    …        the arrays, back to back, in the order of the envelope
    64 bytes signature over everything before it

The body is not parsed before the signature is known to be its signer's. Floats in JSON are shortest
round-trip text, so they survive exactly. Nothing is ever pickled, and nothing is allocated on the
word of a length that the frame does not cover.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.arrays import Arrays
from protocol.errors import DecodeError, MessageTooLarge
from protocol.identity import PUBLIC_KEY_CHARS, SIGNATURE_BYTES, Identity, verify
from protocol.limits import ARRAYS_MAX, BODY_BYTES_MAX, ENVELOPE_BYTES_MAX, FRAME_BYTES_MAX, PROTOCOL_VERSION
from protocol.message import Message
from protocol.messages import MESSAGE_TYPES
from protocol.spec import first_fault

MAGIC = b"GRPO"
_PREFIX = struct.Struct("<4sBII")

M = TypeVar("M", bound=Message)


class _Envelope(BaseModel):
    """What must be known of a frame before its signature can be checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Annotated[str, Field(max_length=40)]
    signer: Annotated[str, Field(max_length=PUBLIC_KEY_CHARS)]
    arrays: Annotated[
        list[tuple[Literal["<i4", "<f4", "|u1"], Annotated[int, Field(ge=0, le=FRAME_BYTES_MAX)]]],
        Field(max_length=ARRAYS_MAX),
    ]


@dataclass(frozen=True, slots=True)
class Signed:
    """A decoded message, the public key that signed it, and the bytes it came in."""

    message: Message
    signer: str
    frame: bytes

    def expect(self, kind: type[M]) -> M:
        """The message as ``kind``; raises DecodeError if it is another kind."""
        if not isinstance(self.message, kind):
            raise DecodeError(f"expected a {kind.__name__}, got a {type(self.message).__name__}")
        return self.message


def encode(message: Message, identity: Identity) -> bytes:
    """Make a signed frame; raises MessageTooLarge beyond the limits of ``limits.py``."""
    arrays = Arrays()
    body = message.model_dump_json(context=arrays).encode()
    described = [[array.dtype.str, len(array)] for array in arrays.items]
    envelope = json.dumps(
        {"kind": type(message).__name__, "signer": identity.public_key, "arrays": described},
        separators=(",", ":"),
    ).encode()
    if len(arrays.items) > ARRAYS_MAX or len(body) > BODY_BYTES_MAX or len(envelope) > ENVELOPE_BYTES_MAX:
        raise MessageTooLarge(f"a body of {len(body)} bytes with {len(arrays.items)} arrays")
    prefix = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, len(envelope), len(body))
    frame = b"".join((prefix, envelope, body, *(array.tobytes() for array in arrays.items)))
    if len(frame) + SIGNATURE_BYTES > FRAME_BYTES_MAX:
        raise MessageTooLarge(f"a frame of {len(frame)} bytes; the limit is {FRAME_BYTES_MAX}")
    return frame + identity.sign(frame)


def decode(frame: bytes) -> Signed:
    """Parse and verify a frame; raises DecodeError, and nothing else, on any other bytes."""
    envelope_end, body_end = _ends(frame)
    try:
        envelope = _Envelope.model_validate_json(frame[_PREFIX.size : envelope_end])
    except ValidationError as exc:
        raise DecodeError(f"not an envelope: {first_fault(exc)}") from exc
    kind = MESSAGE_TYPES.get(envelope.kind)
    if kind is None:
        raise DecodeError(f"no such kind of message: {envelope.kind}")
    if not verify(envelope.signer, memoryview(frame)[:-SIGNATURE_BYTES], frame[-SIGNATURE_BYTES:]):
        raise DecodeError(f"{envelope.kind}: the signature does not match its signer")
    arrays = Arrays(_views(frame, body_end, envelope.arrays))
    try:
        message = kind.model_validate_json(frame[envelope_end:body_end], strict=True, context=arrays)
    except ValidationError as exc:
        raise DecodeError(f"not a valid {envelope.kind}: {first_fault(exc)}") from exc
    if arrays.taken != len(arrays.items):
        raise DecodeError(f"not a valid {envelope.kind}: {len(arrays.items) - arrays.taken} arrays too many")
    return Signed(message, envelope.signer, frame)


def decode_as(frame: bytes, kind: type[M]) -> M:
    """Decode a frame of a known kind; raises DecodeError."""
    return decode(frame).expect(kind)


def readable(frames: Iterable[bytes], kind: type[M]) -> list[M]:
    """The messages of a kind among what peers left there; a fault of one of them must not hide the others."""
    messages = []
    for frame in frames:
        with suppress(DecodeError):
            messages.append(decode_as(frame, kind))
    return messages


def _ends(frame: bytes) -> tuple[int, int]:
    """Where envelope and body end."""
    if not _PREFIX.size + SIGNATURE_BYTES <= len(frame) <= FRAME_BYTES_MAX:
        raise DecodeError(f"a frame of {len(frame)} bytes")
    magic, version, envelope_length, body_length = _PREFIX.unpack_from(frame)
    if magic != MAGIC or version != PROTOCOL_VERSION:
        raise DecodeError(f"not protocol version {PROTOCOL_VERSION}: {frame[:5]!r}")
    envelope_end = _PREFIX.size + envelope_length
    body_end = envelope_end + body_length
    fits = envelope_length <= ENVELOPE_BYTES_MAX and body_length <= BODY_BYTES_MAX
    if not fits or body_end > len(frame) - SIGNATURE_BYTES:
        raise DecodeError(f"an envelope of {envelope_length} and a body of {body_length} bytes do not fit")
    return envelope_end, body_end


def _views(frame: bytes, start: int, described: Sequence[tuple[str, int]]) -> list[NDArray[Any]]:
    """The arrays of a frame, without copying; they must fill it to the signature exactly."""
    extents = [(np.dtype(text), length) for text, length in described]
    if start + sum(dtype.itemsize * length for dtype, length in extents) != len(frame) - SIGNATURE_BYTES:
        raise DecodeError("the arrays do not fill the frame")
    views = []
    for dtype, length in extents:
        views.append(np.frombuffer(frame, dtype, length, start))
        start += dtype.itemsize * length
    return views
