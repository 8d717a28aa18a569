"""How a node reaches and enters a broker: URL and credentials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from protocol.errors import OperatorError

SCHEMES = ("nats", "tls", "ws", "wss")


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """Where the broker is and how to log in; secrets never show in ``repr``.

    ``url`` is ``nats://host:port``, ``tls://``, ``ws://`` or ``wss://``. ``headers`` go into the
    WebSocket handshake (a proxy may want ``Authorization``). ``api_prefix`` is where the JetStream API
    was imported, for accounts that have no streams of their own.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    nkey_seed: str | None = field(default=None, repr=False)
    credentials: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca: Path | None = None
    api_prefix: str = "$JS.API"

    def __post_init__(self) -> None:
        """Raise OperatorError on what no broker could accept."""
        parts = urlsplit(self.url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise OperatorError(
                f"{self.safe_url}: not a broker URL; it begins with nats://, tls://, ws:// or wss://"
            )
        if self.headers and parts.scheme not in ("ws", "wss"):
            raise OperatorError(f"{self.safe_url}: headers belong to ws:// and wss:// URLs only")
        for path in (self.credentials, self.ca):
            if path is not None and not path.is_file():
                raise OperatorError(f"{path}: no such file; check the broker's credentials and CA settings")

    @property
    def safe_url(self) -> str:
        """The URL without user, password or query, for messages and logs."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
