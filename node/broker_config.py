"""Settings of an embedded broker, and the nats-server configuration that they become."""

from __future__ import annotations

import errno
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
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further top-level settings of nats-server: accounts, tls, websocket…"""


def server_config(state_dir: Path, listen: str, token: str, options: BrokerOptions) -> dict[str, Any]:
    """A whole configuration; nats-server reads JSON, so nothing needs quoting."""
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
        "authorization": {"token": token},
        "jetstream": jetstream,
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
