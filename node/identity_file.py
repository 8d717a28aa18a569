"""A node's secret on disk: one nkey seed in a file that only its owner can read."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path

import structlog

from protocol.errors import OperatorError
from protocol.identity import Identity

OWNER_ONLY = 0o600
SEED_FILE_BYTES_MAX = 4096
"""A seed is 58 characters; a larger file is something else and is not read."""

log = structlog.get_logger()


def own_identity(file: Path, node: str, seed: str | None) -> Identity:
    """The identity of ``node``: from ``seed`` if its operator gave one, else as ``file`` keeps it.

    Raises OperatorError on a seed that is none; it is not quoted.
    """
    if seed is None:
        return load_or_create_identity(file, node)
    try:
        return Identity(node, seed.encode())
    except OperatorError as exc:
        raise OperatorError("GRPO_IDENTITY holds no user nkey seed; unset it, or set it to one") from exc


def load_or_create_identity(file: Path, node: str) -> Identity:
    """The identity of ``node``, from ``file`` or newly made and kept there.

    Two processes that start at once get the same identity. A file that others can read is closed to
    them, with a warning. Raises OperatorError if the file holds anything but a user nkey seed, or cannot
    be used.
    """
    try:
        if not file.exists():
            _create(file, Identity.generate(node).seed)
        _close_to_others(file)
        with file.open("rb") as opened:
            seed = opened.read(SEED_FILE_BYTES_MAX)
    except OSError as exc:
        raise OperatorError(
            f"identity file {file} cannot be used: {exc.strerror} ({exc.filename}); set GRPO_HOME to another"
        ) from exc
    try:
        return Identity(node, seed)
    except OperatorError as exc:
        raise OperatorError(
            f"identity file {file} holds no user nkey seed; remove it and a new identity is made"
        ) from exc


def _create(file: Path, seed: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    try:
        os.write(opened, seed + b"\n")
        os.fsync(opened)
        with contextlib.suppress(FileExistsError):  # another process was faster: its seed is the node's
            file.hardlink_to(draft)
    finally:
        os.close(opened)
        draft.unlink()


def _close_to_others(file: Path) -> None:
    found = file.stat().st_mode
    mode = stat.S_IMODE(found)
    if stat.S_ISREG(found) and mode & 0o077:
        file.chmod(OWNER_ONLY)
        log.warning("identity_file_closed", file=str(file), mode=f"{mode:04o}")
