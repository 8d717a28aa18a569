"""What a broker's answers mean: statuses, JetStream errors, and sequences."""

from __future__ import annotations

import json
from typing import Any

from nats.aio.msg import Msg

from protocol.errors import BackPressure, BrokerAbsent, BusError, GrpoError, MessageTooLarge, WrongRevision

STATUS = "Status"
NO_RESPONDERS = "503"
NOT_FOUND = "404"
TOO_MANY = "413"
END_OF_BATCH = "204"

_BACK_PRESSURE = frozenset({10023, 10047, 10077})  # resources, storage, stream full
_WRONG_REVISION = frozenset({10071, 10164})  # wrong last sequence, of the subject or of the stream
_TOO_LARGE = frozenset({10053, 10054})
# No stream, JetStream off or not yet ready, a batch cut off by a reconnection: nothing was stored.
_ABSENT = frozenset({10008, 10014, 10039, 10059, 10076, 10163, 10176, 10210})


def failure(error: dict[str, Any]) -> GrpoError:
    """Translate a JetStream error by what the caller should do about it."""
    code, text = int(error.get("err_code", 0)), f"{error.get('description')} ({error.get('err_code')})"
    if code in _BACK_PRESSURE:
        return BackPressure(text)
    if code in _WRONG_REVISION:
        return WrongRevision(text)
    if code in _TOO_LARGE:
        return MessageTooLarge(text)
    return BrokerAbsent(text) if code in _ABSENT else BusError(text)


def status(msg: Msg) -> str | None:
    """The status of a message without content (``404``, ``503``…), or None for a real message."""
    return msg.headers.get(STATUS) if msg.headers else None


def pending(msg: Msg) -> int:
    """How many messages a batch left out, from the status that ended it."""
    return int((msg.headers or {}).get("Nats-Num-Pending", "0"))


def sequence(msg: Msg) -> int:
    """Stream sequence of a message that was read directly or republished."""
    return int((msg.headers or {})["Nats-Sequence"])


def answer_json(msg: Msg) -> dict[str, Any]:
    """The body of a JetStream answer; raises what ``failure`` names if it is an error."""
    if not msg.data:
        raise BusError(f"an empty answer with status {status(msg)}")
    body: dict[str, Any] = json.loads(msg.data)
    if "error" in body:
        raise failure(body["error"])
    return body
