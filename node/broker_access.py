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
    WebSocket handshake (a proxy may want ``Authorization``); the token in ``bearer_file`` is one of them and
    is read anew at each connection. ``core`` is set for a login whose account has
    no streams but imports those of the broker's core: the name under which it does.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    nkey_seed: str | None = field(default=None, repr=False)
    credentials: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca: Path | None = None
    bearer_file: Path | None = None
    core: str | None = None

    def __post_init__(self) -> None:
        """Raise OperatorError on what no broker could accept."""
        parts = urlsplit(self.url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise OperatorError(
                f"{self.safe_url}: not a broker URL; it begins with nats://, tls://, ws:// or wss://"
            )
        if (self.headers or self.bearer_file) and parts.scheme not in ("ws", "wss"):
            raise OperatorError(
                f"{self.safe_url}: headers and bearer tokens belong to ws:// and wss:// URLs only"
            )
        for path in (self.credentials, self.ca, self.bearer_file):
            if path is not None and not path.is_file():
                raise OperatorError(
                    f"{path}: no such file; check the broker's credentials, CA and bearer token"
                )

    def handshake(self) -> dict[str, list[str]] | None:
        """Headers of a WebSocket handshake that begins now, or None. Raises OSError."""
        found = {key: [value] for key, value in self.headers.items()}
        if self.bearer_file is not None:
            found["Authorization"] = [bearer(self.bearer_file.read_text(encoding="utf-8"))]
        return found or None

    @property
    def safe_url(self) -> str:
        """The URL without user, password or query, for messages and logs."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

    def local(self, subject: str) -> str:
        """What to publish to, to reach ``subject`` in the account that has the streams."""
        return subject if self.core is None else imported(subject, self.core)


def bearer(token: str) -> str:
    """The value of an ``Authorization`` header. Raises OperatorError on what no header can hold."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise OperatorError("the bearer token is empty or not one line of ASCII")
    return f"Bearer {token}"


def imported(subject: str, core: str) -> str:
    """Under what subject an account imports one that a server without JetStream keeps to itself.

    Acknowledgements keep theirs: the reply subjects of messages name them.
    """
    for prefix, name in (("$JS.API.", "API"), ("$KV.", "KV"), ("$O.", "O")):
        if subject.startswith(prefix):
            return f"{core}.{name}.{subject.removeprefix(prefix)}"
    return subject
