"""The content-addressed storage behind a bucket, in memory: what hf_xet uploads, and files made of it.

A file is a list of terms; a term is a run of chunks of one xorb (a pack of compressed chunks). All numbers
are little-endian:

    xorb   chunk*, then an optional footer that begins with ``XETBLOB``
    chunk  version u8, packed length u24, scheme u8, unpacked length u24; then the packed bytes
    shard  header of 48 bytes, then files; a file is an entry of 48 bytes and its terms of 48 bytes each,
           and as many verifications if flag 31 is set, and one more entry if flag 30 is; 32 bytes of ff end
    hash   32 bytes, written as four u64 in hexadecimal

Chunks are never unpacked here: whoever reads gets them as they came.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field

ENTRY = 48
CHUNK_HEADER = 8
SCHEMES = 3
FOOTER = b"XETBLOB"
SHARD_MAGIC = b"HFRepoMetaData"
END_OF_FILES = b"\xff" * 32
HAS_VERIFICATIONS, HAS_METADATA = 1 << 31, 1 << 30
EMPTY = "0" * 64
"""Hash of a file without bytes, which has no terms."""


class BadUpload(ValueError):
    """What a client sent is not what it says."""


@dataclass(frozen=True)
class Xorb:
    """Packed chunks: chunk ``i`` is ``data[starts[i]:starts[i + 1]]`` and has ``sizes[i]`` bytes unpacked."""

    data: bytes
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, data: bytes) -> Xorb:
        """Find the chunks."""
        starts, sizes = [0], []
        while starts[-1] < len(data) and not data.startswith(FOOTER, starts[-1]):
            header = data[starts[-1] : starts[-1] + CHUNK_HEADER]
            if len(header) < CHUNK_HEADER or header[0] or header[4] >= SCHEMES:
                raise BadUpload(f"no chunk at {starts[-1]}")
            starts.append(starts[-1] + CHUNK_HEADER + int.from_bytes(header[1:4], "little"))
            sizes.append(int.from_bytes(header[5:8], "little"))
        if not sizes or starts[-1] > len(data):
            raise BadUpload("a xorb that ends inside a chunk")
        return cls(data, tuple(starts), tuple(sizes))


@dataclass(frozen=True)
class Term:
    """Chunks ``[start, end)`` of a xorb, ``size`` bytes unpacked."""

    xorb: str
    start: int
    end: int
    size: int


def parse_shard(data: bytes) -> dict[str, list[Term]]:
    """The files that a shard describes."""
    if not data.startswith(SHARD_MAGIC):
        raise BadUpload("not a shard")
    entries = (data[at : at + ENTRY] for at in range(ENTRY, len(data) - ENTRY + 1, ENTRY))
    files: dict[str, list[Term]] = {}
    for entry in entries:
        if entry.startswith(END_OF_FILES):
            return files
        flags, count = struct.unpack_from("<II", entry, 32)
        terms = []
        for raw in itertools.islice(entries, count):
            size, start, end = struct.unpack_from("<III", raw, 36)
            terms.append(Term(_hex(raw), start, end, size))
        extra = (count if flags & HAS_VERIFICATIONS else 0) + (1 if flags & HAS_METADATA else 0)
        if len(terms) < count or len(list(itertools.islice(entries, extra))) < extra:
            break
        files[_hex(entry)] = terms
    raise BadUpload("a shard that ends inside a file")


def _hex(raw: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack_from("<4Q", raw))


@dataclass
class Cas:
    """Everything that was uploaded."""

    xorbs: dict[str, Xorb] = field(default_factory=dict)
    files: dict[str, list[Term]] = field(default_factory=lambda: {EMPTY: []})

    def put_xorb(self, name: str, data: bytes) -> bool:
        """Keep a xorb; False if it is known already."""
        new = name not in self.xorbs
        self.xorbs[name] = Xorb.parse(data)
        return new

    def put_shard(self, data: bytes) -> None:
        """Keep files whose xorbs are here."""
        files = parse_shard(data)
        for term in itertools.chain.from_iterable(files.values()):
            xorb = self.xorbs.get(term.xorb)
            if xorb is None or sum(xorb.sizes[term.start : term.end]) != term.size:
                raise BadUpload(f"a term of xorb {term.xorb}, which is not here or other than it says")
        self.files |= files

    def size(self, name: str) -> int | None:
        """Bytes of a file, or None."""
        terms = self.files.get(name)
        return None if terms is None else sum(term.size for term in terms)

    def cut(self, name: str, first: int, end: int) -> tuple[int, list[Term]]:
        """Terms that cover bytes ``[first, end)`` of a file, and how many of their bytes lie before that."""
        found: list[Term] = []
        at = skip = 0
        for term in self.files[name]:
            sizes = self.xorbs[term.xorb].sizes
            chunks: list[int] = []
            for chunk in range(term.start, term.end):
                if at < end and at + sizes[chunk] > first:
                    skip = first - at if not found and not chunks else skip
                    chunks.append(chunk)
                at += sizes[chunk]
            if chunks:
                size = sum(sizes[chunk] for chunk in chunks)
                found.append(Term(term.xorb, chunks[0], chunks[-1] + 1, size))
        return skip, found
