"""A peer's connection to the broker, on which everything can go wrong that goes wrong on a real one.

    peer ── request ──▶ (lost? late?) ── effect at the broker ── answer ──▶ (lost? late?) ── peer

Each direction keeps its order, as TCP does, until the connection breaks. What a request ends with is what
``node/nats_link.py`` makes of the same fault, with its time limits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from node.nats_link import CONNECTED_WAIT_S, READ_S, REQUEST_S
from protocol.errors import BrokerAbsent, GrpoError, UnknownOutcome
from tests.sim.peer_clock import PeerClock
from tests.sim.plan import Odds

T = TypeVar("T")

NOTICED_S = 8.0
"""A cut is noticed within so long: the connection is given up."""
RECONNECT_S = 2.0
LATE_S = 7.0
"""Longer than any request waits."""


class Silent(GrpoError):
    """The broker got the request and does not answer it."""


class Line:
    """One peer's way to the broker."""

    def __init__(
        self,
        seed: str,
        odds: Callable[[], Odds],
        clock: PeerClock,
        on_back: Callable[[], None],
        tell: Callable[..., None],
    ) -> None:
        """``odds`` are those of the moment; ``on_back`` is called after each reconnection."""
        self._random = random.Random(seed)
        self._odds = odds
        self._clock = clock
        self._on_back = on_back
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._connected = asyncio.Event()
        self._connected.set()
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._held: list[Callable[[], None]] = []
        self._free_at = {"up": 0.0, "down": 0.0}
        self._epoch = 0
        self._cut = False
        self.dead = False
        self.broker_is_up = True

    @property
    def connected(self) -> bool:
        """Whether both ends believe in the connection."""
        return self._connected.is_set()

    # --- what a peer does ---

    async def change(self, effect: Callable[[], T], timeout_s: float = REQUEST_S) -> T:
        """A request that may change something. Raises BrokerAbsent, UnknownOutcome, and what the broker
        answers."""
        await self._until_connected()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._waiting[answer] = None
        timer = self._loop.call_later(timeout_s, self._give_up, answer, timeout_s)
        self._request(effect, answer)
        try:
            result = await answer
        except GrpoError:
            await self._clock.thawed()
            raise
        finally:
            timer.cancel()
            self._waiting.pop(answer, None)
        await self._clock.thawed()
        return result

    async def read(self, look: Callable[[], T]) -> T:
        """A request that changes nothing, and is repeated for a while. Raises BrokerAbsent."""
        deadline = self._loop.time() + READ_S
        while True:
            try:
                return await self.change(look)
            except UnknownOutcome as exc:
                if self._loop.time() >= deadline:
                    raise BrokerAbsent("no answer") from exc

    def say(self, effect: Callable[[], object]) -> None:
        """Fire and forget; nothing while disconnected."""
        if self.connected and not self.dead and self._random.random() >= self._odds().lost_word:
            self._send("up", partial(_quietly, effect))

    # --- what the broker does ---

    def push(self, arrive: Callable[[], None]) -> None:
        """Hand something to the peer, which may be cut off by now."""
        self._send("down", partial(self._clock.when_thawed, arrive))

    def announce(self, arrive: Callable[[], None]) -> None:
        """Tell the peer something at most once; if late, then after what was told later."""
        odds = self._odds()
        if not self.connected or self._random.random() < odds.lost_news:
            self._tell("announcement_lost")
        elif self._random.random() < odds.late_news:
            self._loop.call_later(self._random.random() * 3 * LATE_S, self.push, arrive)
        else:
            self.push(arrive)

    # --- what happens to the line ---

    def cut(self) -> None:
        """Nothing passes any more. Sooner or later both ends notice."""
        self._cut = True
        self._loop.call_later(self._random.uniform(0, NOTICED_S), self._notice, self._epoch)

    def heal(self) -> None:
        """What is on its way arrives after all, unless the connection was given up."""
        self._cut = False
        held, self._held = self._held, []
        for action in held:
            action()
        self._reconnect_soon()

    def lose(self) -> None:
        """The connection breaks; what was asked is of unknown outcome at once."""
        self._epoch += 1
        self._connected.clear()
        self._held.clear()
        for answer in list(self._waiting):
            if not answer.done():
                answer.set_exception(UnknownOutcome("the connection broke before an answer came"))
        self._reconnect_soon()

    def broker_back(self) -> None:
        """The broker can be reached again."""
        self.broker_is_up = True
        self._reconnect_soon()

    def broker_gone(self) -> None:
        """The broker was killed, and every connection with it."""
        self.broker_is_up = False
        self.lose()

    def die(self) -> None:
        """The peer is gone. What it had sent may still arrive."""
        self.dead = True
        self._connected.clear()

    # --- inside ---

    async def _until_connected(self) -> None:
        if self.dead:
            raise BrokerAbsent("this node has left the broker")
        if not self.connected:
            try:
                async with asyncio.timeout(CONNECTED_WAIT_S):
                    await self._connected.wait()
            except TimeoutError as exc:
                await self._clock.thawed()
                raise BrokerAbsent(f"not connected for {CONNECTED_WAIT_S:g} s") from exc

    def _request(self, effect: Callable[[], T], answer: asyncio.Future[T]) -> None:
        odds, dice = self._odds(), self._random.random()
        lost_answer = odds.lost_request <= dice < odds.lost_request + odds.lost_answer
        if dice < odds.lost_request:
            self._tell("request_lost")
            if self._random.random() < odds.breaks:
                self._loop.call_later(0.01, self.lose)
        else:
            self._send("up", partial(self._serve, effect, answer, lost_answer))

    def _serve(self, effect: Callable[[], T], answer: asyncio.Future[T], lost_answer: bool) -> None:
        """At the broker."""
        if not self.broker_is_up:
            return
        try:
            result = effect()
        except Silent:
            return
        except GrpoError as exc:
            reply: Callable[[], None] = partial(_refuse, answer, exc)
        else:
            reply = partial(_resolve, answer, result)
        if not lost_answer:
            self._send("down", reply)
            return
        self._tell("answer_lost")
        if self._random.random() < self._odds().breaks:
            self._loop.call_later(0.01, self.lose)

    def _send(self, way: str, action: Callable[[], None]) -> None:
        odds = self._odds()
        delay = self._random.random() * odds.latency_s
        if odds.late and self._random.random() < odds.late:
            delay += self._random.random() * LATE_S
        self._free_at[way] = max(self._loop.time() + delay, self._free_at[way])
        self._loop.call_at(self._free_at[way], self._pass, way, self._epoch, action)

    def _pass(self, way: str, epoch: int, action: Callable[[], None]) -> None:
        """Something arrives at the other end, if it does."""
        if epoch != self._epoch:
            if way == "up" and self._random.random() < 0.5:
                action()  # the server had it already and was slow to read it
        elif self._cut:
            self._held.append(partial(self._send, way, action))
        else:
            action()

    def _give_up(self, answer: asyncio.Future[T], timeout_s: float) -> None:
        if not answer.done():
            answer.set_exception(UnknownOutcome(f"no answer within {timeout_s:g} s"))

    def _notice(self, epoch: int) -> None:
        if self._cut and epoch == self._epoch:
            self._tell("connection_given_up")
            self.lose()

    def _reconnect_soon(self) -> None:
        if not self.connected:
            self._loop.call_later(self._random.uniform(0.05, RECONNECT_S), self._reconnect, self._epoch)

    def _reconnect(self, epoch: int) -> None:
        self._clock.when_thawed(partial(self._connect, epoch))

    def _connect(self, epoch: int) -> None:
        if self.dead or self._cut or not self.broker_is_up or epoch != self._epoch or self.connected:
            return
        self._free_at = {"up": 0.0, "down": 0.0}
        self._connected.set()
        self._on_back()


def _quietly(effect: Callable[[], object]) -> None:
    with suppress(GrpoError):
        effect()


def _resolve(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _refuse(answer: asyncio.Future[T], why: GrpoError) -> None:
    if not answer.done():
        answer.set_exception(why)
