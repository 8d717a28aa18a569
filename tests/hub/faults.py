"""What can go wrong between a client and the Hub, asked for by a test, one request at a time."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

MANY = 1_000_000
"""As good as for ever."""


@dataclass
class Fault:
    """What happens to the next ``count`` requests whose ``METHOD /path`` matches ``match``.

    Example: ``Fault(r"POST .*/batch$", status=500, count=2)``.
    """

    match: str
    count: int = 1
    skip: int = 0
    """Matching requests that are left alone before the first."""
    every: int = 1
    """Of those after them, only every so many-th."""
    status: int | None = None
    """Answer this and do nothing."""
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "injected"
    stall: bool = False
    """Accept the request and never answer."""
    lost: bool = False
    """Do what is asked and break the connection before the answer."""
    torn: int | None = None
    """A batch: do so many of its operations, then break the connection."""
    partial: int | None = None
    """A batch: do so many of its operations and report the others as failed, with status 200."""
    short: int | None = None
    """Answer with so many bytes less, as if that were all."""
    hidden: bool = False
    """A question about files: answer as if none were there yet."""
    hit: threading.Event = field(default_factory=threading.Event)
    """Set once a request met this fault."""
    _seen: int = 0

    def takes(self, request: str) -> bool:
        """Whether this request is one of those; counts it."""
        if self.count <= 0 or not re.search(self.match, request):
            return False
        self._seen += 1
        if self._seen <= self.skip or (self._seen - self.skip) % self.every:
            return False
        self.count -= 1
        self.hit.set()
        return True
