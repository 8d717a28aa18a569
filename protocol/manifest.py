"""Manifests: what lies under a path of the adapter store, and who says so.

``manifest.json`` is readable JSON, written last, so a directory without one does not exist. The
signature is over the canonical JSON of everything else in it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from protocol.clock import VectorClock
from protocol.errors import StoreCorrupt
from protocol.identity import Identity, verify
from protocol.limits import COUNT_MAX
from protocol.message import Message
from protocol.messages import GroupId, StorePath, Tally, Text
from protocol.spec import Name, first_fault

MANIFEST_NAME = "manifest.json"

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class EntryKind(StrEnum):
    """What an entry of the store is."""

    RUN = "run"
    GENESIS = "genesis"
    UPDATE = "update"
    EXPORT = "export"
    STATE = "state"


class FileInfo(Message):
    """One file of an entry."""

    name: FileName
    size: Tally
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Message):
    """What an entry holds. ``groups`` and ``dropped`` let the bucket alone restore the books."""

    path: StorePath
    kind: EntryKind
    run: Name
    author: Name
    clock: VectorClock = VectorClock()
    count: Tally = 0
    """The author's number of updates, this one included."""
    weight: Annotated[float, Field(ge=0, le=COUNT_MAX)] = 0.0
    """Summed weights of the author's updates, this one included."""
    version: Annotated[float, Field(ge=0)] = 0.0
    """Summed weights of all updates in policy(clock)."""
    step_norm: Annotated[float, Field(ge=0)] = 0.0
    """Norm of the author's step at weight 1 (``roles/policy/norm_bound.py``)."""
    policy_digest: Text = ""
    """sha256 of policy(clock) as the author composed it (``roles/policy/compose.py``)."""
    groups: tuple[GroupId, ...] = ()
    """Groups trained by this update."""
    dropped: dict[GroupId, Text] = {}
    """Groups consumed without changing the policy since the update before, with the outcome."""
    extra: dict[Text, Text] = {}
    files: tuple[FileInfo, ...]
    signer: str = ""
    signature: str = ""

    @model_validator(mode="after")
    def _files_are_distinct(self) -> Self:
        names = {file.name for file in self.files}
        if len(names) != len(self.files) or MANIFEST_NAME in names:
            raise ValueError("each file is listed once, and the manifest itself is not")
        return self

    @classmethod
    def describe(cls, files: Mapping[str, bytes]) -> tuple[FileInfo, ...]:
        """Name, size and sha256 of each file, sorted by name."""
        return tuple(
            FileInfo(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in sorted(files.items())
        )

    def signed(self, identity: Identity) -> Manifest:
        """This manifest with ``identity``'s signature."""
        unsigned = self.model_copy(update={"signer": identity.public_key, "signature": ""})
        signature = base64.b64encode(identity.sign(unsigned.canonical())).decode()
        return unsigned.model_copy(update={"signature": signature})

    def canonical(self) -> bytes:
        """The bytes that are signed: sorted JSON without the signature."""
        body = self.model_dump(mode="json", exclude={"signature"})
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    def to_json(self) -> bytes:
        """The content of ``manifest.json``."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, path: str) -> Manifest:
        """Parse and verify; raises StoreCorrupt on anything but a signed manifest of ``path``."""
        try:
            manifest = cls.model_validate_json(data, strict=True)
            signature = base64.b64decode(manifest.signature, validate=True)
        except ValidationError as exc:
            raise StoreCorrupt(f"{path}: not a manifest: {first_fault(exc)}") from exc
        except (binascii.Error, ValueError) as exc:
            raise StoreCorrupt(f"{path}: the manifest's signature is not base64") from exc
        if manifest.path != path:
            raise StoreCorrupt(f"{path}: the manifest is of {manifest.path}")
        if not verify(manifest.signer, manifest.canonical(), signature):
            raise StoreCorrupt(f"{path}: the manifest's signature does not match its signer")
        return manifest
