"""A run in progress at a guarded broker, and mallory, who has a sampler's login."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from node.nats_bus import NatsBus
from protocol.limits import INLINE_BYTES_MAX
from tests.isolation.ground import Guarded, Hand

LARGE = bytes(INLINE_BYTES_MAX + 1)


@dataclass
class Scene:
    """A run in progress: a learner, an honest sampler and a verifier, work in every queue; and mallory."""

    guarded: Guarded
    learner: NatsBus
    bob: NatsBus
    verifier: NatsBus
    mallory: Hand

    async def unchanged_by(self, before: dict[str, Any]) -> None:
        """Fails unless the broker keeps what it kept ``before``."""
        await self.mallory.client.flush()
        after = await self.guarded.state()
        assert after == before
