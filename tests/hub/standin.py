"""The stand-in, served: on a thread of its own beside a test, on any free port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from tests.hub.server import HubServer

START_S = 10.0
LINGER_S = 0.1
"""How long requests that are stalled are waited for at the end."""


async def serve(hub: HubServer, stop: asyncio.Event, started: threading.Event, port: int = 0) -> None:
    """Serve ``hub`` on the loopback until ``stop``; ``hub.url`` is known once ``started`` is set."""
    runner = web.AppRunner(hub.app(), access_log=None, shutdown_timeout=LINGER_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
    finally:
        await runner.cleanup()


@contextmanager
def running(hub: HubServer) -> Iterator[HubServer]:
    """Serve ``hub`` while the body runs."""
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve(hub, stop, started))
        loop.close()

    thread = threading.Thread(target=work, name="hub", daemon=True)
    thread.start()
    assert started.wait(START_S)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
