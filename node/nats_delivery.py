"""One message in a taker's hands, and how it is settled with the broker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg

from node.bus_rules import ACK_RETRY_S, ACK_TRIES
from node.nats_link import Link
from protocol.errors import BrokerAbsent, BusError, UnknownOutcome


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an acknowledgement subject says about its message."""

    stream_sequence: int
    deliveries: int

    @classmethod
    def parse(cls, reply: str) -> Receipt:
        """``$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>…``, two tokens longer with a domain."""
        tokens = reply.split(".")
        start = 4 if len(tokens) < 11 else 6  # noqa: PLR2004 the two layouts that servers send
        return cls(stream_sequence=int(tokens[start + 1]), deliveries=int(tokens[start]))


class NatsDelivery:
    """One message, to be settled once; see ``protocol.ports.Delivery``."""

    def __init__(self, link: Link, msg: Msg, on_settled: Callable[[], None]) -> None:
        self._link = link
        self._reply = msg.reply
        self._on_settled = on_settled
        self._settled = False
        self.receipt = Receipt.parse(msg.reply)
        self.author = msg.subject.rpartition(".")[2]
        """Who published it, as the broker attests."""
        self.data = msg.data
        """The payload, fetched already if it travelled by reference."""
        self.forget: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Removes the payload from the blob bucket, if it is there."""

    @property
    def deliveries(self) -> int:
        """How often this message was handed out, this time included."""
        return self.receipt.deliveries

    async def ack(self) -> None:
        """Done for good, confirmed by the broker. Raises BrokerAbsent, UnknownOutcome."""
        try:
            await self._confirm()
        finally:
            self.free()
        if self.forget is not None:
            await self.forget()

    async def release(self, delay_s: float = 0.0) -> None:
        """Give it to somebody else; best effort."""
        self.free()
        await self._say(f'-NAK {{"delay": {int(delay_s * 1e9)}}}'.encode() if delay_s > 0 else b"-NAK")

    async def reject(self) -> None:
        """Never deliver it again; best effort."""
        self.free()
        await self._say(b"+TERM")
        if self.forget is not None:
            await self.forget()

    async def in_progress(self) -> None:
        """Restart ack_wait; best effort."""
        await self._say(b"+WPI")

    async def _confirm(self) -> None:
        unknown: UnknownOutcome | None = None
        for _ in range(ACK_TRIES):
            try:
                await self._link.request(self._reply, b"+ACK", timeout_s=ACK_RETRY_S)
            except UnknownOutcome as exc:
                unknown = exc
                self.free()  # with its credit free, the message can be handed out again to this very node
            except BrokerAbsent:
                if unknown is None:
                    raise
                break  # an earlier try may have taken effect
            else:
                return
        assert unknown is not None
        raise unknown

    async def _say(self, word: bytes) -> None:
        with suppress(BusError):
            await self._link.send(self._reply, word)

    def free(self) -> None:
        """Count it no longer against its taker's credit; says nothing to the broker."""
        if not self._settled:
            self._settled = True
            self._on_settled()
