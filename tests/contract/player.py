"""Plays a script on a broker and writes down what two nodes observe.

A script is played on the model first, under virtual time, and then on a real broker, which does some
things a little later: whoever plays there waits a while for what the model showed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from protocol.errors import GrpoError, MessageTooLarge, WrongRevision
from protocol.ports import Bus, Clock, Consumer, Delivery, Entry, Write
from protocol.subjects import Bucket, Queue
from tests.contract.scripts import NODES, Step

Q = Queue.ROLLOUT
DELAY_S = 0.35
STEP_S = 0.005
PATIENCE_S = 3.0
QUIET_S = 0.06
"""How long nothing must come before a player believes that nothing comes."""


@dataclass
class Player:
    """Plays a script on a run with two nodes; after a ``model``, in step with it."""

    buses: dict[str, Bus]
    clock: Clock
    model: Player | None = None
    trace: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each step began."""
    began: float = 0.0
    consumers: dict[str, Consumer] = field(default_factory=dict)
    credits: dict[str, int] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    known: dict[tuple[Bucket, str], list[int]] = field(default_factory=dict)
    first: dict[Bucket, int] = field(default_factory=dict)

    async def play(self, script: Sequence[Step]) -> list[str]:
        """What was observed, a line a step, up to the first step at which the model did something else."""
        heads = self.buses[NODES[1]].announcements()
        for bucket in Bucket:
            self.first[bucket] = await self.buses[NODES[0]].put(bucket, "first", b"")
        with_queue = any(name == "consume" for name, _ in script)
        self.began = self.clock.monotonic()
        for name, arguments in script:
            await self._until_it_is_time()
            told = f"{name} {' '.join(map(str, arguments))}: "
            try:
                seen = await getattr(self, f"_{name}")(*arguments)
            except GrpoError as exc:
                seen = type(exc).__name__
            if with_queue and name != "drain":
                seen = f"{seen} {await self._depth(f'{told}{seen}')}"
            self.trace.append(f"{told}{seen}")
            if self.model is not None and self.trace[-1] != self.model.trace[len(self.trace) - 1]:
                return self.trace
        self.trace.append(f"announced: {await self._heard(heads)}")
        return self.trace

    @property
    def _expected(self) -> str:
        """What the model showed at this step."""
        return "" if self.model is None else self.model.trace[len(self.trace)]

    async def _until_it_is_time(self) -> None:
        """A slow machine must not let a message expire that did not expire on the model."""
        self.times.append(self.clock.monotonic() - self.began)
        if self.model is not None:
            await self.clock.sleep(max(0.0, self.model.times[len(self.times) - 1] - self.times[-1]))
        else:
            await self.clock.sleep(STEP_S)

    # --- queue steps ---

    async def _publish(self, node: str, name: str) -> str:
        await self.buses[node].publish(Q, name.encode(), name)
        return "stored"

    async def _consume(self, node: str, credit: int) -> str:
        if node not in self.consumers:
            self.credits[node] = credit
            self.consumers[node] = await self.buses[node].consume(Q, credit)
        return "consumes"

    async def _close(self, node: str) -> str:
        if node in self.consumers:
            await self.consumers.pop(node).close()
        return "closed"

    async def _next(self, node: str) -> str:
        if node not in self.consumers:
            return "no consumer"
        patient = "got" in self._expected
        delivery = await self._take(node, PATIENCE_S if patient else QUIET_S)
        if delivery is None:
            return "nothing"
        self.deliveries.append(delivery)
        return f"got {delivery.data.decode()} {delivery.deliveries}"

    async def _drain(self) -> str:
        """Acknowledge all that anybody can get. After an expiry the order is the broker's own affair."""
        got: list[str] = []

        async def empty(node: str) -> None:
            while (delivery := await self._take(node, 2 * QUIET_S)) is not None:
                got.append(f"{delivery.data.decode()} {delivery.deliveries}")
                await delivery.ack()

        await asyncio.gather(*(empty(node) for node in self.consumers))
        for node in sorted(self.consumers):  # whose request came first is open by now: begin anew, in order
            credit = self.credits[node]
            await self._close(node)
            await self._consume(node, credit)
            await self.clock.sleep(STEP_S)
        return f"{sorted(got)}"

    async def _take(self, node: str, within_s: float) -> Delivery | None:
        waiting = asyncio.ensure_future(self.consumers[node].next())
        alarm = asyncio.ensure_future(self.clock.sleep(within_s))
        await asyncio.wait({waiting, alarm}, return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, alarm):
            task.cancel()
        with suppress(asyncio.CancelledError):
            return await waiting
        return None

    def _chosen(self, which: float) -> Delivery | None:
        return self.deliveries[int(which * len(self.deliveries))] if self.deliveries else None

    async def _settle(self, which: float, how: Callable[[Delivery], object]) -> str:
        delivery = self._chosen(which)
        if delivery is None:
            return "none in hand"
        await how(delivery)  # type: ignore[misc]
        return f"{delivery.data.decode()} {delivery.deliveries}"

    async def _ack(self, which: float) -> str:
        return await self._settle(which, lambda delivery: delivery.ack())

    async def _release(self, which: float) -> str:
        if (await self.buses[NODES[0]].depth(Q)).pending:
            return "not now"  # it races with its taker's next request: either order is a broker's right
        return await self._settle(which, lambda delivery: delivery.release())

    async def _delay(self, which: float) -> str:
        return await self._settle(which, lambda delivery: delivery.release(DELAY_S))

    async def _reject(self, which: float) -> str:
        return await self._settle(which, lambda delivery: delivery.reject())

    async def _alive(self, which: float) -> str:
        return await self._settle(which, lambda delivery: delivery.in_progress())

    async def _depth(self, before: str) -> str:
        """The depth, which a real broker may take a moment to show."""
        deadline = self.clock.monotonic() + PATIENCE_S / 2
        while True:
            depth = await self.buses[NODES[0]].depth(Q)
            text = f"({depth.pending} pending, {depth.unacknowledged} unacknowledged)"
            seen = self.model is None or f"{before} {text}" == self._expected
            if seen or self.clock.monotonic() > deadline:
                return text
            await self.clock.sleep(0.01)

    # --- key steps ---

    async def _put(self, bucket: Bucket, wanted: tuple[str, str, int | None]) -> str:
        write = self._write(bucket, wanted)
        bus = self.buses[NODES[0]]
        revision = await bus.put(bucket, write.key, write.value, expected=write.expected, ttl_s=write.ttl_s)
        return self._wrote(bucket, [write], revision)

    async def _commit(self, bucket: Bucket, wanted: Sequence[tuple[str, str, int | None]]) -> str:
        writes = [self._write(bucket, one) for one in wanted]
        return self._wrote(bucket, writes, await self.buses[NODES[0]].commit(bucket, writes))

    async def _large(self, bucket: Bucket, wanted: tuple[str, str, int | None]) -> str:
        """A megabyte: too large with any header, and that is said before a wrong revision is."""
        write = self._write(bucket, wanted)
        with suppress(MessageTooLarge, WrongRevision):
            await self.buses[NODES[0]].commit(bucket, [Write("large", bytes(1 << 20), 7), write])
            return "stored"
        value = bytes((1 << 20) - 52)
        self.known.setdefault((bucket, "large"), [])
        try:
            revision = await self.buses[NODES[0]].put(bucket, "large", value, expected=0)
        except WrongRevision:
            return "there already"
        return self._wrote(bucket, [Write("large", b"")], revision)

    async def _delete(self, bucket: Bucket, key: str) -> str:
        await self.buses[NODES[0]].delete(bucket, key)
        return "deleted"

    async def _get(self, bucket: Bucket, key: str) -> str:
        return self._told(bucket, await self.buses[NODES[1]].get(bucket, key))

    async def _list(self, bucket: Bucket, prefix: str) -> str:
        found = await self.buses[NODES[1]].list(bucket, prefix)
        return f"{[self._told(bucket, entry) for entry in found.values()]}"

    def _write(self, bucket: Bucket, wanted: tuple[str, str, int | None]) -> Write:
        key, expectation, ttl_s = wanted
        revisions = self.known.get((bucket, key), [])
        expected: int | None = None
        if expectation == "absent":
            expected = 0
        elif expectation == "current" and revisions:
            expected = revisions[-1]
        elif expectation == "stale" and revisions:
            expected = revisions[0] - 1 if len(revisions) == 1 else revisions[-2]
        return Write(key, b"%d" % len(self.trace), expected, ttl_s)

    def _wrote(self, bucket: Bucket, writes: Sequence[Write], last: int) -> str:
        for at, write in enumerate(reversed(writes)):
            self.known.setdefault((bucket, write.key), []).append(last - at)
        return f"revision {last - self.first[bucket]}"

    def _told(self, bucket: Bucket, entry: Entry | None) -> str:
        if entry is None:
            return "absent"
        value = entry.value.decode() if len(entry.value) < 10 else f"{len(entry.value)} bytes"
        return f"{entry.key}={value}@{entry.revision - self.first[bucket]}"

    async def _nap(self, seconds: float) -> str:
        late_s = (
            0.0
            if self.model is None
            else self.clock.monotonic() - self.began - self.model.times[len(self.trace)]
        )
        await self.clock.sleep(max(0.0, seconds - late_s))
        return "slept"

    async def _heard(self, heads: object) -> list[str]:
        heard: list[str] = []
        while True:
            waiting = asyncio.ensure_future(anext(heads))  # type: ignore[call-overload]
            alarm = asyncio.ensure_future(self.clock.sleep(QUIET_S * 3))
            await asyncio.wait({waiting, alarm}, return_when=asyncio.FIRST_COMPLETED)
            alarm.cancel()
            if not waiting.done():
                waiting.cancel()
                return heard
            heard.append(self._told(Bucket.POLICY, waiting.result()))
