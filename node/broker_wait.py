"""Waiting for a broker that is still to come: jobs that start together are ready one by one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import structlog

from node.broker_access import BrokerAccess
from protocol.errors import OperatorError

WAIT_S = 1800.0
"""How long; a job that waits is paid for."""
PAUSE_S = 2.0
DIAL_S = 5.0

DEFAULT_PORTS = {"nats": 4222, "tls": 4222, "ws": 80, "wss": 443}


async def wait_for_port(access: BrokerAccess, deadline_s: float = WAIT_S, pause_s: float = PAUSE_S) -> None:
    """Return once something listens where the broker should be; its name may not even resolve before that.

    Raises OperatorError after ``deadline_s`` seconds.
    """
    parts = urlsplit(access.url)
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    why = ""
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while (failure := await _dial(str(parts.hostname), port)) is not None:
                if not why:
                    structlog.get_logger().warning(
                        "waiting_for_broker", broker=access.safe_url, reason=failure
                    )
                why = failure
                await asyncio.sleep(pause_s)
            return
    raise OperatorError(f"no broker at {access.safe_url} after {deadline_s:g} s ({why or 'it is silent'})")


async def _dial(host: str, port: int) -> str | None:
    """Why nothing can be reached there, or None."""
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "no answer"
    except OSError as exc:
        return exc.strerror or str(exc)
    writer.close()
    return None
