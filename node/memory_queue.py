"""A work queue in memory: each message is handed out until it is acknowledged.

It hands out by itself, as a broker does: to whoever asked, in turn, as soon as there is something.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

from protocol.errors import BackPressure
from protocol.limits import DEDUPE_WINDOW_S
from protocol.ports import Clock, QueueDepth


@dataclass(slots=True)
class Stored:
    """A message in a queue."""

    sequence: int
    data: bytes
    message_id: str = ""
    deliveries: int = 0
    handed_at: float = 0.0
    due: float | None = None
    """When it may be handed out again; None while nobody has it."""


class Taker(Protocol):
    """Somebody who asked for messages."""

    @property
    def wants(self) -> int:
        """How many messages may be handed to it now."""
        ...

    def hand(self, message: Stored) -> None:
        """Take one."""
        ...


class MemoryQueue:
    """Messages, who has them, and the ids that were seen."""

    def __init__(
        self,
        clock: Clock,
        ack_wait_s: float,
        messages_max: int,
        takers: list[Taker] | None = None,
        first: int = 1,
    ) -> None:
        """``takers`` outlive the queue if its broker loses its disk; sequences begin at ``first``."""
        self._clock = clock
        self.ack_wait_s = ack_wait_s
        self.messages_max = messages_max
        self._takers: list[Taker] = [] if takers is None else takers
        self._sequence = first - 1
        self._waiting: deque[Stored] = deque()
        self._taken: dict[int, Stored] = {}
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_at = 0.0

    def publish(self, data: bytes, message_id: str) -> None:
        """Append a message unless its id was seen within the window. Raises BackPressure."""
        now = self._clock.monotonic()
        while self._seen and next(iter(self._seen.values())) <= now - DEDUPE_WINDOW_S:
            self._seen.popitem(last=False)
        if message_id in self._seen:
            return
        if len(self._waiting) + len(self._taken) >= self.messages_max:
            raise BackPressure("maximum messages exceeded")
        self._seen[message_id] = now
        self._sequence += 1
        self._waiting.append(Stored(self._sequence, data, message_id))
        self.hand_out()

    def hand_out(self) -> None:
        """Give what is available to those who asked for it, in turn."""
        while True:
            taker = next((taker for taker in self._takers if taker.wants > 0), None)
            message = self.take() if taker is not None else None
            if taker is None or message is None:
                break
            self._takers.remove(taker)
            self._takers.append(taker)
            taker.hand(message)
        if taker is not None:
            self._set_alarm()

    def take(self) -> Stored | None:
        """Hand out a message whose ack_wait is over, else the oldest new one."""
        now = self._clock.monotonic()
        overdue = (m for m in self._taken.values() if m.due is not None and m.due <= now)
        message = min(overdue, key=lambda m: (m.due, m.sequence), default=None)
        if message is None:
            if not self._waiting:
                return None
            message = self._waiting.popleft()
            self._taken[message.sequence] = message
        message.deliveries += 1
        message.handed_at = now
        message.due = now + self.ack_wait_s
        return message

    def next_due(self) -> float | None:
        """When the next message becomes available without anybody's doing."""
        return min((m.due for m in self._taken.values() if m.due is not None), default=None)

    def acknowledge(self, sequence: int) -> bool:
        """Remove a message, whoever had it last or before; whether the broker answers.

        It is silent about a message that it does not know to have handed out.
        """
        if self._taken.pop(sequence, None) is not None:
            return True
        return sequence <= self._sequence and all(m.sequence != sequence for m in self._waiting)

    def remove(self, sequence: int) -> None:
        """Rejected, by whoever had it last or before."""
        self._taken.pop(sequence, None)

    def postpone(self, sequence: int, delay_s: float) -> None:
        """Available again after ``delay_s``; nothing if it is gone."""
        if sequence in self._taken:
            self._taken[sequence].due = self._clock.monotonic() + delay_s
            self.hand_out()

    def prolong(self, sequence: int) -> None:
        """A sign of life restarts ack_wait, unless it is over: then somebody else gets the message."""
        message, now = self._taken.get(sequence), self._clock.monotonic()
        if message is not None and message.due is not None and message.due > now:
            message.due = now + self.ack_wait_s

    def depth(self) -> QueueDepth:
        """What is in it."""
        return QueueDepth(pending=len(self._waiting), unacknowledged=len(self._taken))

    def forget_ids(self) -> None:
        """More than a restart: as if every message had been acknowledged before it."""
        self._seen.clear()

    def expire(self) -> None:
        """As if nobody had given a sign of life for ack_wait: everything that was taken is available."""
        for message in self._taken.values():
            message.due = self._clock.monotonic()
        self.hand_out()

    def restart(self, unsaved_s: float) -> None:
        """A killed server knows again what it stored. It forgets the ids of messages that are gone, and
        what it handed out in its last ``unsaved_s`` seconds."""
        stored = {m.message_id for m in (*self._waiting, *self._taken.values())}
        for message_id in [known for known in self._seen if known not in stored]:
            del self._seen[message_id]
        now = self._clock.monotonic()
        forgotten = [m for m in self._taken.values() if m.handed_at > now - unsaved_s]
        for message in sorted(forgotten, key=lambda m: m.sequence, reverse=True):
            message.deliveries -= 1
            message.due = now
            if message.deliveries == 0:
                message.due = None
                self._waiting.appendleft(self._taken.pop(message.sequence))

    def vanish(self) -> None:
        """The disk is lost: nobody hears of this queue again."""
        self._takers = []

    def _set_alarm(self) -> None:
        due = self.next_due()
        if due is None or (self._alarm is not None and not self._alarm.done() and self._alarm_at <= due):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = due
        self._alarm = asyncio.create_task(self._hand_out_at(due), name="redelivery")

    async def _hand_out_at(self, due: float) -> None:
        await self._clock.sleep(max(0.0, due - self._clock.monotonic()))
        self._alarm = None
        self.hand_out()
