"""From a store's URL to the adapter that speaks to it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from node.entry_cache import EntryCache
from node.file_store import FileStore
from protocol.errors import OperatorError
from protocol.ports import AdapterStore
from protocol.runspec import StoreSpec

SUPPORTED = "file:///absolute/path (a directory that all nodes can reach)"
PLANNED = {"hf": "hf://buckets/<namespace>/<bucket>", "nats": "nats:// (the broker's object store)"}


def open_store(spec: StoreSpec, cache_dir: Path) -> AdapterStore:
    """The store that ``spec.url`` names; its local copies lie below ``cache_dir``. No I/O yet.

    Raises OperatorError, which lists the supported forms, on a URL that none of them fits.
    """
    url = urlsplit(spec.url)
    if url.scheme in PLANNED:
        raise OperatorError(
            f"store.url: {PLANNED[url.scheme]} is not supported by this version; use {SUPPORTED}"
        )
    if url.scheme != "file":
        raise OperatorError(f"store.url: {spec.url!r} is no store; use {SUPPORTED}")
    if url.netloc not in {"", "localhost"} or not url.path.startswith("/") or url.query or url.fragment:
        raise OperatorError(f"store.url: {spec.url!r} does not name an absolute path; use {SUPPORTED}")
    root = Path(unquote(url.path))
    return FileStore(root, EntryCache(cache_dir), spec.timeout_s)


def create_store(spec: StoreSpec) -> None:
    """Make the directory of a new run's store; nodes that join later must find it (a missing mount is
    a fault, not an empty store). Raises OperatorError if it cannot be made."""
    url = urlsplit(spec.url)
    if url.scheme != "file":
        return
    try:
        Path(unquote(url.path)).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OperatorError(f"store.url: cannot make {unquote(url.path)}: {exc.strerror}") from exc
