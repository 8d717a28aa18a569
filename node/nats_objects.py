"""Named objects in an Object Store bucket, as ``nats object`` and every NATS client read them.

An object's content is chunks under a nuid; its name, size and SHA-256 are a message of their own, whose
subject is the name in base64. Writing several of these messages is one atomic batch.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from nats.aio.msg import Msg
from nats.nuid import NUID
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node import nats_chunks
from node.bus_rules import MARKER_S
from node.nats_answers import sequence
from node.nats_batch import store_all
from node.nats_chunks import CHUNK_BYTES
from node.nats_link import Link
from node.nats_newest import newest, subjects_of
from protocol.limits import COUNT_MAX
from protocol.ports import Write

_DIGEST = "SHA-256="


@dataclass(frozen=True, slots=True)
class Content:
    """Where the bytes of an object lie and what they must be."""

    nuid: str
    size: int
    sha256: str


class ObjectInfo(BaseModel):
    """What a bucket says about an object; other fields of the format are not needed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    nuid: Annotated[str, Field(pattern=r"^[A-Za-z0-9]*$")] = ""
    size: Annotated[int, Field(ge=0, le=COUNT_MAX)] = 0
    digest: str = ""
    deleted: bool = False

    @property
    def content(self) -> Content:
        """Where it lies; with an empty hash, which fits nothing, if the digest is none."""
        try:
            sha256 = base64.urlsafe_b64decode(self.digest.removeprefix(_DIGEST)).hex()
        except (binascii.Error, ValueError):
            sha256 = ""
        return Content(self.nuid, self.size, sha256)


class Objects:
    """The objects of one bucket."""

    def __init__(self, link: Link, bucket: str) -> None:
        self._link = link
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._root = f"$O.{bucket}.M."
        self._ids = NUID()

    async def create(self) -> None:
        """Make the bucket; again is harmless. Raises BackPressure, BusError."""
        config: dict[str, Any] = {
            "name": self._stream,
            "subjects": [f"$O.{self._bucket}.C.>", f"$O.{self._bucket}.M.>"],
            "storage": "file",
            "num_replicas": 1,
            "discard": "new",
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "allow_msg_ttl": True,
            "allow_atomic": True,
        }
        await self._link.api(f"STREAM.CREATE.{self._stream}", config)

    async def names(self) -> list[str]:
        """Names of all objects, and of some that were deleted a moment ago; sorted."""
        subjects = await subjects_of(self._link, self._stream, f"{self._root}>")
        return sorted(filter(None, (_name(subject.removeprefix(self._root)) for subject in subjects)))

    async def look(self, names: Sequence[str]) -> dict[str, ObjectInfo]:
        """Those of ``names`` that exist."""
        found = await newest(self._link, self._stream, [self._root + _token(name) for name in names])
        infos = filter(None, map(_info, found))
        return {info.name: info for info in infos if info.name in names}

    async def look_at(self, name: str) -> tuple[ObjectInfo | None, int]:
        """An object, if it exists, and the revision of its name, 0 if it has none."""
        msg = await self._link.read_last(self._stream, self._root + _token(name))
        return (None, 0) if msg is None else (_info(msg), sequence(msg))

    async def name_all(self, contents: Mapping[str, Content], first: str, expected: int) -> None:
        """Give every content its name, all or none; ``first`` must have revision ``expected``. Raises
        WrongRevision, UnknownOutcome, BrokerAbsent, BackPressure, MessageTooLarge."""
        writes = [
            Write(_token(name), self._described(name, content), expected if name == first else None)
            for name, content in contents.items()
        ]
        await store_all(self._link, self._root, writes, self._ids)

    async def remove(self, info: ObjectInfo) -> None:
        """Take an object away; a marker tells of it for a moment. Raises BusError."""
        marker = {"name": info.name, "bucket": self._bucket, "nuid": info.nuid, "deleted": True}
        headers = {"Nats-Rollup": "sub", "Nats-TTL": f"{MARKER_S}s"}
        await self._link.store(self._root + _token(info.name), json.dumps(marker).encode(), headers)
        await self.forget(info.content)

    async def put(self, data: bytes) -> Content:
        """Store bytes that have no name yet. Raises MessageTooLarge, BusError, and leaves nothing then."""
        content = Content(self._ids.next().decode(), len(data), await nats_chunks.digest(data))
        await nats_chunks.write(self._link, self._chunks(content), nats_chunks.cut(self._link, data))
        return content

    async def get(self, content: Content) -> bytes | None:
        """The bytes, or None if they are gone or others than promised. Raises BrokerAbsent."""
        subject = self._chunks(content)
        return await nats_chunks.read(self._link, self._stream, subject, content.size, content.sha256)

    async def forget(self, content: Content) -> None:
        """Remove bytes; best effort."""
        await nats_chunks.remove(self._link, self._chunks(content))

    def _chunks(self, content: Content) -> str:
        return f"$O.{self._bucket}.C.{content.nuid}"

    def _described(self, name: str, content: Content) -> bytes:
        digest = base64.urlsafe_b64encode(bytes.fromhex(content.sha256)).decode()
        return json.dumps(
            {
                "name": name,
                "bucket": self._bucket,
                "nuid": content.nuid,
                "size": content.size,
                "chunks": -(-content.size // CHUNK_BYTES),
                "digest": f"{_DIGEST}{digest}",
                "mtime": datetime.now(UTC).isoformat(),
                "options": {"max_chunk_size": CHUNK_BYTES},
            }
        ).encode()


def _token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _name(token: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(token).decode()
    except (binascii.Error, ValueError):
        return None


def _info(msg: Msg) -> ObjectInfo | None:
    """None for a deletion, and for what is no description of an object."""
    try:
        info = ObjectInfo.model_validate_json(msg.data)
    except ValidationError:
        return None
    return None if info.deleted else info
