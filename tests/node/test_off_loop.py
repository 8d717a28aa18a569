"""Blocking calls: their results, their deadlines, and that none of them stops the loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from node.off_loop import OffLoop


async def test_a_call_returns_its_value_from_another_thread():
    assert await OffLoop("test").run(threading.current_thread, 5) is not threading.current_thread()


async def test_what_a_call_raises_reaches_its_caller():
    with pytest.raises(ZeroDivisionError):
        await OffLoop("test").run(lambda: 1 // 0, 5)


async def test_a_hanging_call_times_out_and_the_loop_goes_on_meanwhile():
    end = threading.Event()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    with pytest.raises(TimeoutError):
        await OffLoop("test").run(end.wait, 0.05)
    ticking.cancel()
    end.set()
    assert ticks > 10


async def test_no_more_threads_hang_than_allowed():
    end, begun = threading.Event(), []
    off_loop = OffLoop("test", threads_max=2)

    def hang() -> None:
        begun.append(threading.current_thread())
        end.wait()

    results = await asyncio.gather(*(off_loop.run(hang, 0.05) for _ in range(6)), return_exceptions=True)
    assert all(isinstance(result, TimeoutError) for result in results)
    assert len(begun) == 2
    end.set()


async def test_a_thread_that_ends_late_is_free_again():
    end = threading.Event()
    off_loop = OffLoop("test", threads_max=1)
    with pytest.raises(TimeoutError):
        await off_loop.run(end.wait, 0.02)
    end.set()
    assert await off_loop.run(lambda: "done", 5) == "done"


async def test_a_cancelled_caller_leaves_the_thread_usable():
    end = threading.Event()
    off_loop = OffLoop("test", threads_max=1)
    waiting = asyncio.create_task(off_loop.run(end.wait, 5))
    await asyncio.sleep(0)
    waiting.cancel()
    end.set()
    assert await off_loop.run(lambda: "done", 5) == "done"


def test_a_hanging_call_does_not_keep_the_process_from_exiting():
    code = (
        "import asyncio, threading\n"
        "from node.off_loop import OffLoop\n"
        "try:\n"
        "    asyncio.run(OffLoop('test').run(threading.Event().wait, 0.01))\n"
        "except TimeoutError:\n"
        "    print('timed out')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "timed out\n"
