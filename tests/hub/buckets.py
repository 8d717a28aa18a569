"""The stand-in's buckets: who may see them, what lies in them, and what a batch does to them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.hub.cas import Cas

BAD_PATH = re.compile(r"^/|/$|//|(^|/)\.\.?(/|$)|\\|\0|^$")

Json = dict[str, Any]


def iso(moment: datetime) -> str:
    """A moment as the Hub writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


@dataclass(frozen=True)
class Stored:
    """A file of a bucket: a name for content."""

    xet_hash: str
    size: int
    mtime_ms: int
    uploaded: datetime

    def described(self, path: str) -> Json:
        """As listings and paths-info show it."""
        mtime = datetime.fromtimestamp(self.mtime_ms / 1000, UTC)
        return {
            "type": "file",
            "path": path,
            "size": self.size,
            "xetHash": self.xet_hash,
            "mtime": iso(mtime),
            "uploadedAt": iso(self.uploaded),
        }


@dataclass
class HubBucket:
    """One bucket."""

    id: str
    private: bool
    files: dict[str, Stored] = field(default_factory=dict)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def owner(self) -> str:
        """The namespace, which is the name of a user."""
        return self.id.partition("/")[0]

    @property
    def info(self) -> Json:
        """As ``bucket_info`` shows it."""
        return {
            "id": self.id,
            "private": self.private,
            "createdAt": iso(self.created),
            "updatedAt": iso(max((file.uploaded for file in self.files.values()), default=self.created)),
            "size": sum(file.size for file in self.files.values()),
            "totalFiles": len(self.files),
        }

    def listed(self, prefix: str, *, recursive: bool) -> list[Json]:
        """What begins with ``prefix``, letter by letter: ``a/1`` also finds ``a/10``, as on the Hub."""
        found: dict[str, Json] = {}
        for path, file in sorted(self.files.items()):
            if not path.startswith(prefix):
                continue
            cut = path.find("/", len(prefix) + 1)
            if recursive or cut < 0:
                found[path] = file.described(path)
            else:
                folder = path[:cut]
                found[folder] = {"type": "directory", "path": folder, "uploadedAt": iso(file.uploaded)}
        return list(found.values())

    def apply(self, operation: Json, cas: Cas) -> str | None:
        """One operation of a batch; what was wrong with it, or None."""
        kind, path = operation["type"], operation["path"]
        if BAD_PATH.search(path):
            return "invalid path"
        if kind == "deleteFile":
            self.files.pop(path, None)
            return None
        size = cas.size(operation["xetHash"])
        if size is None:
            return f"xet hash {operation['xetHash']} not found"
        self.files[path] = Stored(operation["xetHash"], size, operation["mtime"], datetime.now(UTC))
        return None
