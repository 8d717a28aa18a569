"""``python -m tests.hub [PORT]``: the stand-in by hand, for ``HF_ENDPOINT`` and ``HF_TOKEN=hf_alice``."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

from tests.hub.server import HubServer
from tests.hub.standin import serve


async def main(port: int) -> None:
    """Serve until interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    hub, started = HubServer(), threading.Event()
    serving = asyncio.create_task(serve(hub, asyncio.Event(), started, port))
    await asyncio.to_thread(started.wait)
    logging.getLogger("hub").info("export HF_ENDPOINT=%s HF_TOKEN=%s", hub.url, next(iter(hub.tokens)))
    await serving


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
