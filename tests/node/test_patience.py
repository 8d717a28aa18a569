"""How long a store is patient."""

from __future__ import annotations

import asyncio

import pytest

from node.patience import Patience
from node.virtual_time import in_virtual_time


@in_virtual_time
async def test_pauses_grow_up_to_a_bound_until_the_deadline():
    loop, patience = asyncio.get_running_loop(), Patience(100, first_pause_s=1, pause_max_s=4)
    pauses, before = [], loop.time()
    while await patience.pause():
        pauses.append(loop.time() - before)
        before = loop.time()
    assert 0.5 <= pauses[0] <= 1.5
    assert 1 <= pauses[1] <= 3
    assert all(2 <= pause <= 6 for pause in pauses[2:])
    assert 0 < patience.left_s <= 6


@in_virtual_time
async def test_a_success_makes_the_next_pause_short_again():
    loop, patience = asyncio.get_running_loop(), Patience(100, first_pause_s=1, pause_max_s=32)
    for _ in range(4):
        await patience.pause()
    patience.took_effect()
    before = loop.time()
    assert await patience.pause()
    assert loop.time() - before <= 1.5


@in_virtual_time
async def test_what_was_asked_for_is_waited_and_never_beyond_the_deadline():
    loop, patience = asyncio.get_running_loop(), Patience(10)
    assert await patience.pause(at_least_s=7)
    assert loop.time() >= 7
    assert not await patience.pause(at_least_s=4)
    assert patience.left_s == pytest.approx(10 - loop.time(), abs=0.01)
