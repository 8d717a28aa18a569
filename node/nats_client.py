"""nats-py with its known faults mended, and how a node opens a connection with it.

The overrides touch private methods of nats-py 2.16 and 2.17; each has a canary in
``tests/node/test_nats_faults.py`` that fails when an upgrade changes what it mends.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import nats.aio.client
import nats.errors
import structlog
from nats.aio.client import PING_PROTO, Server
from nats.aio.transport import WebSocketTransport
from nats.protocol.parser import PERMISSIONS_ERR

from node.broker_access import BrokerAccess
from node.bus_rules import message_bytes
from protocol.errors import OperatorError

CONNECT_TIMEOUT_S = 2
"""One attempt: TCP, TLS, login."""
FIRST_CONNECT_S = 5.0
"""How long a node that was never connected keeps trying before it gives up."""
BACKOFF_BASE_S = 0.1
BACKOFF_CAP_S = 2.0
"""Longest pause between two attempts: a node is back within 5 s of the broker's return."""
PING_INTERVAL_S = 10
PINGS_OUTSTANDING_MAX = 2
"""A silent connection is given up after 20 to 30 s."""

CONNECTION_STAYS = (
    PERMISSIONS_ERR,
    "invalid subject",
    "invalid publish subject",
    "maximum subscriptions exceeded",
)
"""Errors after which the server keeps the connection; after every other one it hangs up."""
LOGIN_ERRORS = ("authorization", "authentication", "nkey", "user jwt")

log = structlog.get_logger("nats")

Callback = Callable[[], Awaitable[None]]


class HardenedClient(nats.aio.client.Client):
    """A client whose ``flush`` is a barrier, that never closes for good by itself, and never sends late."""

    handshake: Callable[[], dict[str, list[str]] | None] = staticmethod(lambda: None)
    """Headers for the next WebSocket handshake: tokens of proxies are renewed."""

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Count the headers too: a server closes the connection over a message beyond its limit."""
        if message_bytes(payload, headers) > self._max_payload:
            raise nats.errors.MaxPayloadError
        await super().publish(subject, payload, reply, headers)

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        # The PING must queue behind what was published before it, or flush() promises nothing.
        self._pongs.append(future if future is not None else asyncio.get_running_loop().create_future())
        self._pending.append(PING_PROTO)
        self._pending_data_size += len(PING_PROTO)
        await self._flush_pending()

    async def _process_err(self, err_msg: str) -> None:
        # Expired logins, connection limits and the like end a connection, never the node.
        error = nats.errors.Error(f"nats: {err_msg}")
        await self._error_cb(error)
        if not any(text in err_msg for text in CONNECTION_STAYS):
            await self._process_op_err(error)

    async def _read_loop(self) -> None:
        # An unexpected exception in the parser ends the loop but leaves the status "connected".
        await super()._read_loop()
        me = asyncio.current_task()
        if self.is_connected and me is self._reading_task and me is not None and not me.cancelling():
            await self._process_op_err(nats.errors.Error("nats: the read loop ended while connected"))

    async def _attempt_reconnect(self) -> None:
        # What did not leave before the connection broke must not arrive after the caller was told that
        # its outcome is unknown. Aborting also spares the wait for a peer that no longer reads.
        self._pending.clear()
        self._pending_data_size = 0
        self._abort()
        await super()._attempt_reconnect()

    async def close(self) -> None:
        """Leave for good; a WebSocket that never opened leaves its session behind otherwise."""
        me = asyncio.current_task()
        try:
            await super().close()
        except asyncio.CancelledError:
            # One future says "closed" to all who wait for a stream: the reconnection task, cancelled
            # while it waited, cancelled it for us too.
            if me is not None and me.cancelling():
                self._abort()
                raise
        session = getattr(self._transport, "_client", None)
        if session is not None:
            await session.close()

    def _abort(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    async def _connect_to_server(self, s: Any) -> None:
        self._abort()  # an attempt whose login was refused left its connection open
        with _Translated():
            # A transport that failed to connect is used again, with the headers it was made with.
            self.options["ws_connection_headers"] = self.handshake()
            if isinstance(self._transport, WebSocketTransport):
                self._transport._ws_headers = self.options["ws_connection_headers"]  # noqa: SLF001
            await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        with _Translated():
            await super()._process_connect_init()


class _Translated:
    """Turns what ends nats-py's reconnection task for good (a proxy's 502, say) into what it retries."""

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        retried = OSError | nats.errors.Error | TimeoutError
        if isinstance(exc, Exception) and not isinstance(exc, retried):
            raise nats.errors.Error(f"nats: {type(exc).__name__}: {exc}") from exc


def jittered_backoff(
    own_hosts: frozenset[str],
) -> Callable[[list[Server], dict[str, Any]], tuple[Server, float]]:
    """Full jitter between 0 and a doubling bound; only hosts that the operator named.

    Addresses that a server gossips are wrong behind NAT and lack the path of a WebSocket URL.
    """

    def choose(pool: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
        own = [server for server in pool if server.uri.netloc in own_hosts] or pool
        server = min(own, key=lambda candidate: candidate.reconnects)
        bound = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(server.reconnects, 16))
        return server, random.uniform(0, bound)

    return choose


async def open_client(
    access: BrokerAccess,
    node: str,
    *,
    on_lost: Callback,
    on_back: Callback,
    timeout_s: float = FIRST_CONNECT_S,
) -> HardenedClient:
    """Connect; afterwards the client reconnects for ever. Raises OperatorError within ``timeout_s``."""
    client = HardenedClient()
    client.handshake = access.handshake
    failures: list[Exception] = []
    refused = asyncio.Event()

    async def on_error(exc: Exception) -> None:
        if not refused.is_set():  # else what follows it, a connection that is reset, hides the reason
            failures[:] = [exc]
        if _is_login_error(exc):
            refused.set()
        _report(exc)

    attempt = asyncio.ensure_future(
        client.connect(
            **_options(access, node), error_cb=on_error, disconnected_cb=on_lost, reconnected_cb=on_back
        )
    )
    denial = asyncio.ensure_future(refused.wait())
    connected = False
    try:
        # Not wait_for: nats-py swallows cancellation in places, and then wait_for never returns.
        await asyncio.wait({attempt, denial}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not attempt.done():
            raise OperatorError(_advice(access, failures[-1] if failures else None))
        attempt.result()
        connected = True
    except (nats.errors.Error, OSError, ValueError, ImportError) as exc:
        if isinstance(exc, OperatorError):
            raise
        raise OperatorError(_advice(access, failures[-1] if refused.is_set() else exc)) from exc
    finally:
        denial.cancel()
        if not attempt.done():
            attempt.cancel()
            await asyncio.wait({attempt}, timeout=1)
        if not connected:
            await client.close()
    return client


def _options(access: BrokerAccess, node: str) -> dict[str, Any]:
    host = access.url.split("://", 1)[1].split("/", 1)[0]
    return {
        "servers": [access.url],
        "name": node,
        "token": access.token,
        "nkeys_seed_str": access.nkey_seed,
        "user_credentials": None if access.credentials is None else str(access.credentials),
        "tls": None if access.ca is None else ssl.create_default_context(cafile=str(access.ca)),
        "inbox_prefix": f"_INBOX_{node}",
        "connect_timeout": CONNECT_TIMEOUT_S,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": BACKOFF_BASE_S,
        "reconnect_to_server_handler": jittered_backoff(frozenset({host, f"{host}:4222"})),
        "ping_interval": PING_INTERVAL_S,
        "max_outstanding_pings": PINGS_OUTSTANDING_MAX,
        # Nothing is buffered while disconnected: callers wait a bounded time instead, and know.
        "pending_size": 0,
    }


def _is_login_error(exc: Exception) -> bool:
    return any(text in str(exc).lower() for text in LOGIN_ERRORS)


def _report(exc: Exception) -> None:
    text = str(exc).lower()
    if PERMISSIONS_ERR in text:
        log.error("broker_permission_denied", error=text)
    elif _is_login_error(exc):
        log.warning("broker_login_refused", error=text)
    else:
        log.debug("broker_connection_failed", error=f"{type(exc).__name__}: {exc}")


def _advice(access: BrokerAccess, exc: Exception | None) -> str:
    if isinstance(exc, ImportError):
        return f"{access.safe_url}: WebSocket URLs need aiohttp; install it with: pip install 'grpo-node[ws]'"
    if exc is not None and _is_login_error(exc):
        return (
            f"the broker at {access.safe_url} refused the login; check token, nkey or "
            "credentials; an invitation that ran out or was revoked is replaced by whoever gave it"
        )
    reason = "it did not answer" if exc is None else str(exc) or type(exc).__name__
    return f"no broker at {access.safe_url} ({reason}); start one with `grpo-node broker` or check the URL"
