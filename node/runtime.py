"""The runtime: one loop, signals, threads, and the one place where any exception is answered.

SIGTERM and Ctrl-C drain: the node stops taking work, finishes or hands back what it has in hand, and
exits 0. A second one exits at once. A person's mistake is one line and exit code 2; a fault of our own
is a traceback and exit code 1.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from protocol.errors import FencedError, GrpoError, OperatorError, StoreDenied

T = TypeVar("T")

SWITCH_INTERVAL_S = 5e-4
"""How long a thread may keep the interpreter while the loop waits for it. Python's 5 ms would cost every
message that much beside a thread that samples or trains."""

EXIT_FAULT = 1
EXIT_OPERATOR = 2
EXIT_IMPATIENT = 130

Main = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


def run_until_stopped(main: Main, *, grace_s: float) -> int:
    """Run ``main(stop)`` to its end; returns the exit code for the process."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        asyncio.run(_supervise(main, grace_s))
    except BaseException as exc:  # noqa: BLE001 the one place; nothing is swallowed
        return explain(exc)
    return 0


async def _supervise(main: Main, grace_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(EXIT_IMPATIENT)
        structlog.get_logger().info("draining", signal=signal.Signals(number).name, grace_s=grace_s)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    work = asyncio.ensure_future(main(stop))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not work.done():
        await asyncio.wait({work}, timeout=grace_s)
    if not work.done():
        structlog.get_logger().warning("grace_time_over")
        work.cancel()
        await asyncio.wait({work}, timeout=2.0)
    if work.done() and not work.cancelled():
        work.result()


def explain(exc: BaseException) -> int:
    """Tell a person what ended the process; returns the exit code."""
    causes = flatten(exc)
    if all(isinstance(cause, KeyboardInterrupt | asyncio.CancelledError) for cause in causes):
        return EXIT_IMPATIENT
    bugs = [cause for cause in causes if not isinstance(cause, GrpoError | asyncio.CancelledError)]
    if bugs:  # also beside a person's mistake, which it must not hide behind
        structlog.get_logger().error("node_crashed", exc_info=exc)
    known = [cause for cause in causes if isinstance(cause, OperatorError | FencedError | StoreDenied)]
    if known:
        print(f"grpo-node: {known[0]}", file=sys.stderr)  # noqa: T201 the last word goes to the person
        return EXIT_OPERATOR
    if not bugs:
        first = next(cause for cause in causes if isinstance(cause, GrpoError))
        print(f"grpo-node: {type(first).__name__}: {first}", file=sys.stderr)  # noqa: T201
    return EXIT_FAULT


def flatten(exc: BaseException) -> list[BaseException]:
    """The leaves of an exception group, or the exception itself."""
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for member in exc.exceptions for leaf in flatten(member)]
    return [exc]


class ThreadOffload:
    """Heavy work of one part on one thread of its own, in order."""

    def __init__(self, name: str) -> None:
        """The thread starts with the first piece of work."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def close(self) -> None:
        """Let the thread end after what it is doing."""
        self._executor.shutdown(wait=False, cancel_futures=True)
