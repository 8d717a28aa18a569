"""Bugs that a system like this one has had, planted on purpose: the storm must find each of them.

Each is the smallest change of the shipped code that makes the mistake. ``python -m tests.sim --plant NAME``
plays seeds with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import roles.learner.collector
import roles.learner.commit
import roles.learner.done
import roles.learner.register
import roles.policy.policies
import roles.ring
from protocol.clock import VectorClock
from protocol.ports import Delivery, Write
from protocol.subjects import Queue
from roles.learner.buffer import Buffer
from roles.learner.collector import Collector
from roles.learner.commit import HeadWriter
from roles.learner.issuer import Issuer
from roles.learner.janitor import Janitor
from roles.policy.compose import Factors
from roles.policy.policies import Policies

Replace = Callable[[Any, str, Any], None]
"""Puts another value in place of an attribute, for a while."""


def no_dedupe(replace: Replace) -> None:
    """Nobody looks whether a group was consumed before."""
    done_write = roles.learner.done.done_write

    async def never(*_: Any) -> bool:
        return False

    def regardless(group: str, outcome: str, learner: str, count: int, **_: Any) -> Write:
        return done_write(group, outcome, learner, count)

    replace(roles.learner.collector, "is_done", never)
    replace(roles.learner.commit, "done_write", regardless)


def no_age_check(replace: Replace) -> None:
    """A group is trained on however old it is."""
    replace(Buffer, "_drop_stale", lambda *_: None)


def acknowledge_before_commit(replace: Replace) -> None:
    """A learner acknowledges what it has read."""
    take_in = Collector._take_in

    async def hasty(self: Collector, delivery: Delivery) -> None:
        await take_in(self, delivery)
        await self._ring.settle(delivery)

    replace(Collector, "_take_in", hasty)


def blind_retry(replace: Replace) -> None:
    """A commit of unknown outcome is sent again without a look, and its refusal believed."""
    replace(HeadWriter, "_is_ours", staticmethod(lambda *_: False))
    replace(HeadWriter, "_is_as_it_was", lambda *_: True)


def no_re_issue(replace: Replace) -> None:
    """Tasks that left the ring with the broker's disk stay lost."""

    async def forget(self: Issuer) -> None:
        self._lost = False
        await self._keep_cursor()

    replace(Issuer, "_issue_again", forget)


def announced_once(replace: Replace) -> None:
    """Who missed an announcement is told nothing: heads are read when a peer starts, and never again."""
    read_heads, started = Policies.read_heads, set[int]()

    async def once(self: Policies) -> VectorClock:
        if id(self) not in started:
            started.add(id(self))
            return await read_heads(self)
        return self.newest

    replace(Policies, "read_heads", once)


def sum_in_arrival_order(replace: Replace) -> None:
    """Updates are added as they came, and fp32 addition is not associative."""
    orders = itertools.count()

    def compose(genesis: Factors, updates: Mapping[str, Factors]) -> Factors:
        arrived = list(updates.values())
        if next(orders) % 2:
            arrived.reverse()
        total = {name: tensor.copy() for name, tensor in genesis.items()}
        for factors in arrived:
            for name, tensor in total.items():
                tensor += factors[name]
        return total

    replace(roles.policy.policies, "compose", compose)
    replace(roles.learner.register, "compose", compose)


def eager_retention(replace: Replace) -> None:
    """A learner keeps its newest update alone."""

    async def clean(self: Janitor) -> None:
        for stored in self._updates[:-1]:
            if await self._delete(stored.path):
                self._updates.remove(stored)

    replace(Janitor, "clean", clean)


def forgets_dead_letters(replace: Replace) -> None:
    """A message that came too often is thrown away without a letter."""

    async def drop(_self: Any, delivery: Delivery, _queue: Queue, *_: Any) -> None:
        await delivery.reject()

    replace(roles.ring.Ring, "bury", drop)


PLANTS: dict[str, Callable[[Replace], None]] = {
    plant.__name__: plant
    for plant in (
        no_dedupe,
        no_age_check,
        acknowledge_before_commit,
        blind_retry,
        no_re_issue,
        announced_once,
        sum_in_arrival_order,
        eager_retention,
        forgets_dead_letters,
    )
}
