"""Tools as a person writes them, good and bad; imported by the process that runs them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

add = 0


def total(numbers: list[float], unit: Literal["m", "km"] = "m") -> dict[str, object]:
    """Add numbers up.

    Units are kept.
    """
    return {"total": sum(numbers), "unit": unit}


async def shout(text: Annotated[str, Field(description="what to shout")]) -> str:
    """Say it loudly."""
    await asyncio.sleep(0)
    return text.upper()


def forever() -> str:
    """Never end."""
    while True:
        pass


def greedy(megabytes: int) -> int:
    """Hold memory."""
    return len(bytearray(megabytes << 20))


def long(characters: int) -> str:
    """Say much."""
    return "x" * characters


def broken() -> str:
    """Fail."""
    raise KeyError("nothing\nhere")


def dying() -> str:
    """Leave without a word."""
    os._exit(3)


def read(path: str) -> str:
    """Read a file of the sampler."""
    return Path(path).read_text("utf-8")


def connect(port: int) -> str:
    """Reach the network."""
    with socket.create_connection(("127.0.0.1", port), 1):
        return "connected"


def start() -> str:
    """Start a process."""
    return subprocess.run(["/bin/echo", "started"], capture_output=True, text=True, check=True).stdout


def untyped(a) -> str:
    """A parameter that nobody can describe."""
    return str(a)


def many(*words: str) -> str:
    """A parameter that has no name."""
    return " ".join(words)
