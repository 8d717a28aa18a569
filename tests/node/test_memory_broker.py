"""The memory broker's rules that depend on time, under a clock that tests move."""

from __future__ import annotations

import pytest

from node.memory_keys import MemoryKeys
from node.memory_queue import MemoryQueue
from protocol.errors import WrongRevision
from protocol.limits import DEDUPE_WINDOW_S
from protocol.ports import Entry, Write


class HandClock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def queue(clock: HandClock) -> MemoryQueue:
    queue = MemoryQueue(clock, ack_wait_s=30.0, messages_max=10)
    queue.publish(b"1", "m1")
    return queue


def test_a_taken_message_comes_back_when_ack_wait_is_over_and_not_before(
    clock: HandClock, queue: MemoryQueue
):
    assert queue.take() is not None
    clock.now += 29.9
    assert queue.take() is None
    assert queue.next_due() == 130.0
    clock.now += 0.1
    again = queue.take()
    assert again is not None
    assert again.deliveries == 2


def test_redelivery_comes_before_new_messages(clock: HandClock, queue: MemoryQueue):
    queue.take()
    queue.publish(b"2", "m2")
    clock.now += 30
    first, second = queue.take(), queue.take()
    assert [m.data for m in (first, second) if m] == [b"1", b"2"]


def test_an_id_is_remembered_for_the_window_and_lost_with_a_restart(clock: HandClock, queue: MemoryQueue):
    taken = queue.take()
    assert taken is not None
    queue.remove(taken.sequence)
    clock.now += DEDUPE_WINDOW_S - 1
    queue.publish(b"1", "m1")
    assert queue.depth().total == 0
    clock.now += 1
    queue.publish(b"1", "m1")
    assert queue.depth().total == 1
    queue.forget_ids()
    queue.publish(b"1", "m1")
    assert queue.depth().total == 2


def test_settling_twice_or_late_harms_nobody(clock: HandClock, queue: MemoryQueue):
    taken = queue.take()
    assert taken is not None
    queue.remove(taken.sequence)
    queue.remove(taken.sequence)
    queue.postpone(taken.sequence, 0)
    assert queue.take() is None


def test_an_expired_key_is_absent_for_compare_and_set_too(clock: HandClock):
    heard: list[Entry] = []
    keys = MemoryKeys(clock, heard.append)
    first = keys.write([Write("node", b"1", expected=0, ttl_s=15)])
    with pytest.raises(WrongRevision):
        keys.write([Write("node", b"2", expected=0)])
    clock.now += 15
    assert keys.get("node") is None
    with pytest.raises(WrongRevision):
        keys.write([Write("node", b"2", expected=first)])
    assert keys.write([Write("node", b"2", expected=0)]) == first + 1
    assert [entry.value for entry in heard] == [b"1", b"2"]
