"""Virtual time itself: it jumps, it orders, and it notices when nobody can go on."""

from __future__ import annotations

import asyncio
import time

import pytest

from node.virtual_time import Deadlock, VirtualClock, VirtualLoop, simulate


def test_an_hour_passes_at_once_and_in_order():
    clock, seen = VirtualClock(), []

    async def wake_at(seconds: float) -> None:
        await clock.sleep(seconds)
        seen.append(clock.monotonic())

    async def main() -> None:
        await asyncio.gather(wake_at(3000.0), wake_at(1.0), wake_at(60.0))

    began = time.monotonic()
    simulate(main)
    assert seen == pytest.approx([1.0, 60.0, 3000.0])
    assert time.monotonic() - began < 10.0


def test_a_simulation_that_does_not_end_is_ended():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        simulate(main, limit_s=5.0)


def test_waiting_with_no_timer_left_is_a_deadlock():
    loop = VirtualLoop()
    waiting = loop.create_task(asyncio.Event().wait())
    with pytest.raises(Deadlock, match="nothing is due"):
        loop.run_until_complete(waiting)
    waiting.cancel()
    loop.call_later(0.0, lambda: None)
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    loop.close()


def test_threads_are_refused():
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="no threads under virtual time"):
        simulate(main)


def test_an_exception_that_nobody_looked_at_fails_the_simulation():
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await VirtualClock().sleep(1.0)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        simulate(main)
