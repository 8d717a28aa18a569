"""Calls that may block or hang, run off the event loop with a deadline.

Python cannot stop a thread. So a call that hangs keeps one of ``threads_max`` threads until it ends,
while its caller is told in time. The threads are daemons: a hanging store does not keep the process
from exiting, as the threads of ``asyncio.to_thread`` would.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class OffLoop:
    """A bounded number of daemon threads, for use from one event loop."""

    def __init__(self, name: str, threads_max: int = 4) -> None:
        """``name`` labels the threads in a debugger."""
        self._name = name
        self._free = asyncio.Semaphore(threads_max)

    async def run(self, call: Callable[[], T], deadline_s: float) -> T:
        """What ``call`` returns or raises. Raises TimeoutError after ``deadline_s`` seconds.

        The deadline includes the wait for a thread. After it, ``call`` may still be running, or may yet
        take effect: it must be safe to repeat.
        """
        async with asyncio.timeout(deadline_s):
            await self._free.acquire()
            loop = asyncio.get_running_loop()
            result: asyncio.Future[T] = loop.create_future()
            threading.Thread(
                target=self._work, args=(loop, result, call), name=self._name, daemon=True
            ).start()
            return await result

    def _work(
        self, loop: asyncio.AbstractEventLoop, result: asyncio.Future[T], call: Callable[[], T]
    ) -> None:
        try:
            value = call()
        except BaseException as exc:  # noqa: BLE001 whatever it is, it belongs to the caller
            settle: Callable[[], None] = _setter(result.set_exception, exc)
        else:
            settle = _setter(result.set_result, value)

        def finish() -> None:
            self._free.release()
            if not result.done():
                settle()

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish)


def _setter(set_to: Callable[[T], None], value: T) -> Callable[[], None]:
    return lambda: set_to(value)
