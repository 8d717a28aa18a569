"""What the verifiers hold of samplers, as the broker keeps it: read by everybody, written by verifiers.

    verifier ──judges──▶ KV run: standing.<public key> ──▶ verifiers and learners refuse its groups
                                      │                    the sampler itself: reload, or stop
    a person ──lifts───────────────▶──┘

A standing is about a key, not a name. One that its own key has signed is ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from protocol.codec import decode, encode
from protocol.errors import BusError, DecodeError, WrongRevision
from protocol.messages import Standing
from protocol.ports import Entry
from protocol.reasons import Judgement
from protocol.subjects import STANDINGS, Bucket, standing_key
from roles.ring import Ring

POLL_S = 3.0
"""How soon everybody knows of a judgement."""


class Standings:
    """One peer's view of all judgements."""

    def __init__(self, ring: Ring) -> None:
        """Nothing is read before ``read`` or ``run``."""
        self._ring = ring
        self._known: dict[str, tuple[Standing, int]] = {}
        """By public key, with the revision."""
        self._frames: dict[str, bytes] = {}
        """What was read of each, as its judge signed it, by key at the broker."""
        self._lost: list[str] = []
        """Keys that the broker had once and lacked at the last look."""

    async def run(self) -> None:
        """Follow the broker for ever."""
        async for _ in self.watch():
            pass

    async def watch(self) -> AsyncIterator[None]:
        """Follow the broker for ever, with a turn after every look."""
        while True:
            try:
                await self.read()
            except BusError as exc:
                self._ring.log.warning("standings_unread", error=str(exc) or type(exc).__name__)
            yield
            await self._ring.clock.sleep(POLL_S)

    async def read(self) -> None:
        """Read all. Raises BusError. A judgement that is gone with the broker's disk still holds here."""
        found = await self._ring.bus.list(Bucket.RUN, STANDINGS)
        for entry in found.values():
            self._note(entry)
        self._lost = [key for key in self._frames if key not in found]

    async def say_again(self) -> None:
        """Write what the broker lost with its disk, as its judge signed it. Nobody deletes a judgement, so
        what it lacks it has lost; whatever stands there by now stays. For those who may judge."""
        lost, self._lost = self._lost, []
        for key in lost:
            try:
                with contextlib.suppress(WrongRevision):
                    await self._ring.bus.put(Bucket.RUN, key, self._frames[key], expected=0)
                    self._ring.log.warning("standing_said_again", key=key)
            except BusError as exc:
                self._ring.log.warning("standing_unrestored", key=key, error=str(exc) or type(exc).__name__)

    def of(self, public_key: str) -> Standing | None:
        """The judgement of a key, or None."""
        known = self._known.get(public_key)
        return known[0] if known else None

    def refusal(self, public_key: str) -> str | None:
        """Why nothing signed by a key is used, in one line, or None if it is."""
        standing = self.of(public_key)
        if standing is None or standing.judgement is not Judgement.QUARANTINED:
            return None
        return f"{standing.node} was quarantined by {standing.judge}: {standing.reason}"

    @property
    def all(self) -> list[Standing]:
        """Every judgement, in order of node and key."""
        return sorted((s for s, _ in self._known.values()), key=lambda s: (s.node, s.public_key))

    async def judge(self, standing: Standing) -> bool:
        """Write a judgement on top of the one known here; False if somebody else was faster, which is read.

        Waits through the broker's absence. Raises MessageTooLarge.
        """
        key = standing_key(standing.public_key)
        known = self._known.get(standing.public_key)
        frame = encode(standing, self._ring.identity)
        expected = known[1] if known else 0
        with contextlib.suppress(WrongRevision):
            await self._ring.persist(lambda: self._ring.bus.put(Bucket.RUN, key, frame, expected=expected))
        entry = await self._ring.persist(lambda: self._ring.bus.get(Bucket.RUN, key))
        if entry is not None:
            self._note(entry)
        return entry is not None and entry.value == frame

    def _note(self, entry: Entry) -> None:
        try:
            signed = decode(entry.value)
            standing = signed.expect(Standing)
        except DecodeError as exc:
            self._ring.log.warning("standing_unreadable", key=entry.key, error=str(exc))
            return
        ours = (standing.run, standing_key(standing.public_key)) == (self._ring.spec.name, entry.key)
        if not ours or signed.signer == standing.public_key:
            self._ring.log.warning("standing_misplaced", key=entry.key, node=standing.node)
            return
        known = self._known.get(standing.public_key)
        if known is None or known[1] != entry.revision:
            self._known[standing.public_key] = (standing, entry.revision)
            self._frames[entry.key] = entry.value
