"""Settings of an embedded broker, and the nats-server configuration that they become."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import OperatorError

LOG_FILE = "nats.log"
PORT_FILE = "port"
"""The port of last time: clients that outlive a restart find the broker again."""


@dataclass(frozen=True, slots=True)
class Doors:
    """Where a broker listens besides its own address; a host and a port each, a port of 0 being any."""

    websocket: tuple[str, int] | None = None
    leaf: tuple[str, int] | None = None
    """For the brokers of households (docs/broker.md)."""
    tls: tuple[Path, Path] | None = None
    """Certificate chain and key in PEM. A WebSocket on loopback stays plain: a proxy stands before it."""

    def settings(self) -> dict[str, Any]:
        """As nats-server wants it. Nobody is told of further addresses: behind a proxy they are wrong."""
        secret = (
            {} if self.tls is None else {"tls": {"cert_file": f"{self.tls[0]}", "key_file": f"{self.tls[1]}"}}
        )
        found: dict[str, Any] = {**secret}
        if self.websocket is not None:
            host, port = self.websocket
            plain = not secret or is_loopback(host)
            found["websocket"] = {"host": host, "port": port or -1, "compression": True}
            found["websocket"] |= {"no_tls": True} if plain else secret
        if self.leaf is not None:
            host, port = self.leaf
            found["leafnodes"] = {"host": host, "port": port or -1, "no_advertise": True, **secret}
        return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What the operator of an embedded broker may decide; the defaults suit one machine."""

    host: str = "127.0.0.1"
    max_payload_bytes: int = 1 << 20
    max_file_bytes: int = 16 << 30
    sync_interval_s: float | None = None
    """Seconds between fsyncs; 0 syncs every message, None leaves the server's two minutes. Only a loss
    of power needs it: what a killed server has written stays."""
    die_with_parent: bool = True
    """Stop the server when the thread that started it ends, however it ends (Linux)."""
    accounts: bool = False
    """Accounts for others (``node/broker_accounts.py``) instead of one token that may do everything. A
    directory that has accounts keeps them."""
    doors: Doors = Doors()
    jetstream: bool = True
    """A household's broker has no streams."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further top-level settings of nats-server."""

    def __post_init__(self) -> None:
        """Raise OperatorError on files that cannot be read."""
        for path in self.doors.tls or ():
            if not path.is_file():
                raise OperatorError(f"{path}: no such file; --tls takes a certificate and its key in PEM")


def server_config(
    state_dir: Path, listen: str, login: Mapping[str, Any], options: BrokerOptions
) -> dict[str, Any]:
    """A whole configuration, in the JSON that nats-server reads; ``login`` says who may enter."""
    jetstream: dict[str, Any] = {
        "store_dir": str(state_dir / "jetstream"),
        "max_file_store": options.max_file_bytes,
        "max_memory_store": 64 << 20,
    }
    if options.sync_interval_s is not None:
        jetstream["sync_interval"] = f"{options.sync_interval_s:g}s" if options.sync_interval_s else "always"
    return {
        "server_name": f"grpo-{state_dir.name}",
        "listen": listen,
        "ports_file_dir": str(state_dir),
        "log_file": str(state_dir / LOG_FILE),
        "logfile_size_limit": 16 << 20,
        "logfile_max_num": 2,
        "max_payload": options.max_payload_bytes,
        **({"jetstream": jetstream} if options.jetstream else {}),
        **options.doors.settings(),
        **login,
        **options.extra,
    }


def choose_port(state_dir: Path, host: str, port: int | None) -> int:
    """``port`` if given and free, else that of last time if free, else -1: any. Raises OperatorError."""
    if port is not None:
        if not _port_is_free(host, port):
            raise OperatorError(f"port {port} on {host} is taken; choose another one")
        return port
    last = 0
    with suppress(OSError, ValueError):
        last = int((state_dir / PORT_FILE).read_text())
    return last if last and _port_is_free(host, last) else -1


def _port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: a port in TIME_WAIT after a restart is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return False
            raise OperatorError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    return True
