"""A file with a secret in it: readable by its owner only, and written whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from protocol.errors import OperatorError

OWNER_ONLY = 0o600


def write_private(path: Path, text: str, *, durable: bool = False) -> None:
    """Write ``text``; whoever opens ``path`` sees the old content or the new one, also after a loss of power
    if ``durable``. Raises OperatorError."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError as exc:
        raise OperatorError(f"{path}: cannot be written: {exc.strerror}") from exc
