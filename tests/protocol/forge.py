"""What a stranger can do: build frames with any content and sign them with a key of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from protocol.codec import _PREFIX, MAGIC, encode
from protocol.limits import PROTOCOL_VERSION
from protocol.message import Message
from protocol.messages import Event
from tests.build import RUN, an_identity

STRANGER = an_identity("stranger")


def a_frame(
    kind: str = "Event",
    body: bytes = b"{}",
    arrays: Sequence[Any] = (),
    data: bytes = b"",
    *,
    envelope: bytes | None = None,
    version: int = PROTOCOL_VERSION,
) -> bytes:
    """A frame that is correctly signed, whatever it says."""
    described = {"kind": kind, "signer": STRANGER.public_key, "arrays": arrays}
    head = json.dumps(described).encode() if envelope is None else envelope
    frame = _PREFIX.pack(MAGIC, version, len(head), len(body)) + head + body + data
    return frame + STRANGER.sign(frame)


def parts(frame: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Envelope, body and the bytes of the arrays of a frame."""
    _, _, envelope_length, body_length = _PREFIX.unpack_from(frame)
    body_at = _PREFIX.size + envelope_length
    arrays_at = body_at + body_length
    return (
        json.loads(frame[_PREFIX.size : body_at]),
        json.loads(frame[body_at:arrays_at]),
        frame[arrays_at:-64],
    )


def altered(message: Message, **changes: Any) -> bytes:
    """The frame of ``message`` with other values in its body, signed by the stranger."""
    envelope, body, data = parts(encode(message, STRANGER))
    return a_frame(envelope["kind"], json.dumps(body | changes).encode(), envelope["arrays"], data)


def an_event(**fields: Any) -> Event:
    """A message without arrays."""
    return Event(run=RUN, node="node-1", role="learner", name="step_done", at=1.0, fields=fields)


def as_json(value: object) -> bytes:
    """JSON as Python writes it, NaN and lone surrogates included."""
    return json.dumps(value).encode()
