"""Atomic batches (nats-server 2.12): several messages of one stream, all of them or none."""

from __future__ import annotations

from collections.abc import Sequence

from nats.nuid import NUID

from node.bus_rules import batch_headers, write_headers
from node.nats_answers import answer_json
from node.nats_link import Link
from protocol.errors import BrokerAbsent, BusError, UnknownOutcome
from protocol.ports import Write


async def store_all(link: Link, root: str, writes: Sequence[Write], ids: NUID) -> int:
    """Store each write under the subject ``root`` + key; the sequence of the last.

    Until the last message nothing can take effect, so failures before it raise BrokerAbsent. Raises
    WrongRevision, UnknownOutcome, MessageTooLarge.
    """
    if len(writes) == 1:
        headers = write_headers(writes[0], writes[0].expected)
        return int((await link.store(root + writes[0].key, writes[0].value, headers or None))["seq"])
    batch = ids.next().decode()
    messages = [
        (root + write.key, write.value, headers)
        for write, headers in zip(writes, batch_headers(batch, writes), strict=True)
    ]
    for _, data, headers in messages:
        link.check_size(data, headers)
    try:
        await _open_batch(link, *messages[0])
        for subject, data, headers in messages[1:-1]:
            await link.send(subject, data, headers=headers)
    except UnknownOutcome as exc:
        raise BrokerAbsent("a commit could not begin") from exc
    return int((await link.store(*messages[-1]))["seq"])


async def _open_batch(link: Link, subject: str, data: bytes, headers: dict[str, str]) -> None:
    answer = await link.request(subject, data, headers)
    if answer.data:  # a batch that was opened is answered with an empty message
        answer_json(answer)
        raise BusError(f"{subject} does not take atomic batches; create the run again")
