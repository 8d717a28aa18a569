"""A lease: all deliveries of one group that a learner has in hand.

A group may arrive again while it waits for its commit: its verifier sent it twice, or this learner was
silent for longer than ack_wait. Every arrival may be the same message, so acknowledging one of them
before the commit could lose the group; they are settled together.
"""

from __future__ import annotations

import asyncio

from protocol.ports import Delivery
from roles.ring import Ring


class Lease:
    """One group's deliveries, oldest first."""

    def __init__(self, first: Delivery) -> None:
        """Begin with the delivery that brought the group."""
        self._deliveries = [first]
        self.settled = False
        """The group was committed; what arrives now is recognised by its ``done`` key."""

    def add(self, again: Delivery) -> None:
        """The group arrived once more. It counts once against the credit, or copies of groups that wait for a
        step would keep out the group that the step waits for."""
        for delivery in self._deliveries:
            delivery.free()
        self._deliveries.append(again)

    async def keep_alive(self) -> None:
        """Restart ack_wait, by the newest delivery and any that is another message."""
        for delivery in tuple(self._deliveries):
            await delivery.in_progress()

    async def settle(self, ring: Ring) -> None:
        """The group is committed: acknowledge every copy."""
        self.settled = True
        await asyncio.gather(*(ring.settle(delivery) for delivery in self._deliveries))

    async def release(self) -> None:
        """Give every copy to somebody else."""
        for delivery in self._deliveries:
            await delivery.release()
