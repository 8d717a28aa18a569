"""Virtual time: an event loop that never waits. When nothing is ready, its clock jumps to the next timer.

Single thread, no sockets, no threads: a simulated hour takes as long as the work in it, and runs the
same way every time.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

WALL_AT_START = 1_800_000_000.0
"""Unix seconds at which every simulation begins."""


class Deadlock(RuntimeError):
    """Nobody can ever run again: everything waits and no timer is set."""


class _JumpingSelector(selectors.BaseSelector):
    """Reports no I/O, ever; instead of waiting, it lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return self._keys[number]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now:.3f} s nothing is ready and nothing is due")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose seconds cost nothing."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.set_exception_handler(self._keep_exception)
        self.unhandled: list[str] = []
        """What asyncio would only have logged: exceptions that nobody looked at."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(self, *_args: Any) -> NoReturn:  # type: ignore[override]
        """Refused: a thread would bring real time in."""
        raise RuntimeError("no threads under virtual time: take heavy work as an argument")

    def _keep_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.unhandled.append(f"{context['message']}: {context.get('exception')!r}")


class VirtualClock:
    """The Clock port on the running loop's time."""

    def monotonic(self) -> float:
        """Seconds since the simulation began."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Unix seconds."""
        return WALL_AT_START + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        timer = loop.call_later(max(0.0, seconds), woken.set_result, None)
        try:
            await woken
        finally:
            timer.cancel()


def simulate(main: Callable[[], Coroutine[Any, Any, T]], *, limit_s: float = 3600.0) -> T:
    """Run ``main`` to its end under virtual time. Raises TimeoutError after ``limit_s`` virtual seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await main()

    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(bounded())
        assert loop.unhandled == [], loop.unhandled
    return result


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an async test an ordinary one that runs under virtual time; it keeps its fixtures."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        simulate(lambda: test(*args, **kwargs))

    return run
