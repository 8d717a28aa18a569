"""Node names: one live process per name and machine, and a good default."""

from __future__ import annotations

import fcntl
import platform
import re
from itertools import count
from pathlib import Path
from typing import IO

from node.settings import NodeSettings
from protocol.errors import OperatorError

_HELD: list[IO[str]] = []
"""Locked files: kept open, for a lock ends with its file."""


def claim_home(settings: NodeSettings) -> Path:
    """The node's own directory, named like the node and locked for as long as this process lives.

    Without a name the first free one of ``<host>-<role>``, ``<host>-<role>-2``… is taken, so that a
    learner that starts again continues as itself. Raises OperatorError if a process of this name runs.
    """
    if settings.name is not None:
        home = settings.places.node(settings.run, settings.name)
        if not _lock(home):
            what = "choose another --name"
            if settings.invitation is not None:
                what = "it logs in with this invitation from its next connection on"
            raise OperatorError(f"a node named {settings.name} already runs here; {what}")
        return home
    base = default_name(platform.node(), settings.roles[0])
    for number in count(1):
        home = settings.places.node(settings.run, base if number == 1 else f"{base}-{number}")
        if _lock(home):
            return home
    raise AssertionError("unreachable")


def default_name(host: str, role: str) -> str:
    """``<host>-<role>`` with only the characters that names may have."""
    plain = re.sub(r"[^a-z0-9-]+", "-", host.partition(".")[0].lower()).strip("-")[:32].rstrip("-")
    return f"{plain or 'node'}-{role}"


def _lock(home: Path) -> bool:
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / ".lock").open("a")
    except OSError as exc:
        raise OperatorError(f"{home}: cannot keep this node's state there: {exc.strerror}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False
    _HELD.append(lock)
    return True
