"""A bounded one-way channel from a bus to one reader, which never slows the bus down."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

FEED_ITEMS_MAX = 1024
"""A reader that falls further behind loses the oldest items."""


class Feed(Generic[T]):
    """An async iterator over what is ``put`` into it; ends once closed and empty."""

    def __init__(self) -> None:
        self._items: deque[T] = deque(maxlen=FEED_ITEMS_MAX)
        self._news = asyncio.Event()
        self._closed = False

    def put(self, item: T) -> None:
        """Add an item; drops the oldest when full."""
        self._items.append(item)
        self._news.set()

    def close(self) -> None:
        """End the iteration after what is already there."""
        self._closed = True
        self._news.set()

    def __aiter__(self) -> Feed[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()
