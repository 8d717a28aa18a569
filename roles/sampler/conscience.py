"""What a sampler does when verifiers judge it: warned, it loads its policy anew; quarantined, it stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from protocol.errors import EngineError, OperatorError, StoreError
from protocol.reasons import Judgement
from roles.ring import Ring
from roles.standings import Standings


class Conscience:
    """Watches the standing of this node's own key."""

    def __init__(self, ring: Ring, reload: Callable[[], Awaitable[None]]) -> None:
        """``reload`` fetches, verifies and loads the newest policy as if for the first time."""
        self._ring = ring
        self._reload = reload
        self._standings = Standings(ring)
        self._heeded: float | None = None
        """When the warning was given that was acted on."""

    async def run(self) -> None:
        """Watch for ever. Raises OperatorError once this key is quarantined."""
        watching = self._standings.watch()
        async for _ in watching:
            await self._heed()

    async def _heed(self) -> None:
        standing = self._standings.of(self._ring.identity.public_key)
        if standing is None:
            return
        if standing.judgement is Judgement.QUARANTINED:
            raise OperatorError(
                f"{standing.node} is quarantined by {standing.judge}: {standing.reason}; whoever runs "
                f"{standing.run} can look at it (grpo-node audit show {standing.node}) and lift it"
            )
        if standing.judgement is Judgement.WARNED and standing.at != self._heeded:
            self._heeded = standing.at
            self._ring.log.error("sampler_malfunctions", judge=standing.judge, reason=standing.reason)
            try:
                await self._reload()
            except (EngineError, StoreError) as exc:
                self._ring.log.warning("policy_not_reloaded", error=str(exc) or type(exc).__name__)
                return
            await self._ring.tell("policy_reloaded", reason=standing.reason)
