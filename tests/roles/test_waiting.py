"""Waiting with a way out: naps, stops, and cancellations that are neither lost nor swallowed."""

from __future__ import annotations

import asyncio

import pytest

from node.virtual_time import VirtualClock, in_virtual_time
from protocol.errors import StoreUnavailable
from roles.ring import nap, until


@in_virtual_time
async def test_a_nap_ends_early_when_woken_and_the_next_one_does_not():
    clock, wake = VirtualClock(), asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, wake.set)
    await nap(clock, 10.0, wake)
    assert clock.monotonic() == pytest.approx(1.0)
    await nap(clock, 10.0, wake)
    assert clock.monotonic() == pytest.approx(11.0)


@in_virtual_time
async def test_a_nap_that_was_woken_before_it_began_ends_at_once():
    clock, wake = VirtualClock(), asyncio.Event()
    wake.set()
    await nap(clock, 10.0, wake)
    assert (clock.monotonic(), wake.is_set()) == (0.0, False)


@in_virtual_time
async def test_until_gives_the_result_or_nothing_once_stopped():
    clock, stop = VirtualClock(), asyncio.Event()

    async def work(seconds: float) -> str:
        await clock.sleep(seconds)
        return "done"

    assert await until(stop, work(1.0)) == "done"
    asyncio.get_running_loop().call_later(1.0, stop.set)
    assert await until(stop, work(60.0)) is None
    assert clock.monotonic() == pytest.approx(2.0)


@in_virtual_time
async def test_until_keeps_a_result_that_comes_at_the_moment_of_the_stop():
    stop, made = asyncio.Event(), asyncio.Event()

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            made.set()
        return "a delivery that was already taken"

    asyncio.get_running_loop().call_later(1.0, stop.set)
    assert await until(stop, stubborn()) == "a delivery that was already taken"


@in_virtual_time
async def test_until_raises_what_the_work_raises():
    async def fail() -> None:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        await until(asyncio.Event(), fail())


@in_virtual_time
async def test_a_caller_that_is_cancelled_while_it_cleans_up_is_cancelled():
    clock = VirtualClock()

    async def slow_to_end() -> None:
        try:
            await clock.sleep(100.0)
        except asyncio.CancelledError:
            await clock.sleep(5.0)
            raise

    stop = asyncio.Event()

    async def caller() -> str:
        await until(stop, slow_to_end())
        return "went on as if nothing had happened"

    calling = asyncio.ensure_future(caller())
    await clock.sleep(1.0)
    stop.set()
    await clock.sleep(1.0)
    calling.cancel()
    await asyncio.wait({calling})
    assert calling.cancelled()
