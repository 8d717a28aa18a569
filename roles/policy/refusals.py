"""Refusals: a peer tells once of each update or policy that it does not use, and why."""

from __future__ import annotations

from protocol.errors import GrpoError, StoreUnavailable
from roles.ring import Ring


class Refusals:
    """What one peer has told of; however often a refused update is tried again, it is told once."""

    def __init__(self, ring: Ring) -> None:
        """Nothing was refused yet."""
        self._ring = ring
        self._told: set[str] = set()

    async def tell(self, what: str, why: GrpoError) -> None:
        """``what`` (``<learner>:<count>``, or a policy's clock) is not used now; a delay is only logged."""
        if isinstance(why, StoreUnavailable):
            self._ring.log.warning("update_delayed", update=what, reason=str(why))
        elif what not in self._told:
            self._told.add(what)
            await self._ring.tell("update_rejected", update=what, reason=str(why), kind=type(why).__name__)
