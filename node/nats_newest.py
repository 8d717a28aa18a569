"""The newest message of each of many subjects of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from nats.aio.msg import Msg

from node.nats_answers import TOO_MANY, pending, sequence, status
from node.nats_link import Link

SUBJECTS_PER_READ = 512
"""The server refuses to answer a direct get of more than 1024 subjects."""


async def newest(link: Link, stream: str, subjects: Sequence[str]) -> list[Msg]:
    """Newest message of each subject that matches, deletion markers included; one pattern or many subjects.

    Raises BrokerAbsent.
    """
    if len(subjects) > SUBJECTS_PER_READ:
        return await _in_parts(link, stream, subjects)
    found: list[Msg] = []
    first = 1
    while subjects:
        page = await link.read_many(stream, {"multi_last": list(subjects), "seq": first})
        if status(page[-1]) == TOO_MANY:
            return await _in_parts(link, stream, await subjects_of(link, stream, subjects[0]))
        found += page[:-1]
        if len(page) == 1 or pending(page[-1]) == 0:
            break
        first = sequence(page[-2]) + 1
    return found


async def subjects_of(link: Link, stream: str, pattern: str) -> list[str]:
    """All subjects of a stream that match and have messages, sorted. Raises BrokerAbsent."""
    found: list[str] = []
    while True:
        query = {"subjects_filter": pattern, "offset": len(found)}
        info = await link.read_api(f"STREAM.INFO.{stream}", query)
        page = info["state"].get("subjects") or {}
        found += page
        if not page or len(found) >= info.get("total", 0):
            return sorted(found)


async def _in_parts(link: Link, stream: str, subjects: Sequence[str]) -> list[Msg]:
    found: list[Msg] = []
    for start in range(0, len(subjects), SUBJECTS_PER_READ):
        found += await newest(link, stream, subjects[start : start + SUBJECTS_PER_READ])
    return found
