"""A world in bad weather: every node has a clock, a line and a store of its own, and all of them fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from node.entry_cache import EntryCache
from node.memory_store import MemoryBucket, MemoryStore, Operation, StoreFault
from node.runs import store_settings
from protocol.codec import encode
from protocol.identity import Identity
from protocol.messages import RunState
from protocol.subjects import SPEC_KEY, Bucket
from tests.sim.line import Line
from tests.sim.peer_clock import PeerClock
from tests.sim.plan import CALM, Kind, Machine, Odds, Plan, machine_of
from tests.sim.site import Site
from tests.sim.storm_bus import StormBus
from tests.sim.swarm import Peer, World
from tests.sim.trace import Trace

STORE_TIMEOUT_S = 2.0
STORE_LATENCY_S = 0.1


class StormStore(MemoryStore):
    """The bucket from one node's side: it takes a moment, and sometimes more than that."""

    def __init__(
        self,
        bucket: MemoryBucket,
        cache: EntryCache,
        clock: PeerClock,
        seed: str,
        odds: Callable[[], Odds],
        is_away: Callable[[], bool],
        tell: Callable[..., None],
    ) -> None:
        super().__init__(bucket, cache, clock, timeout_s=STORE_TIMEOUT_S, faults=self._weather)
        self._random = random.Random(seed)
        self._odds = odds
        self._is_away = is_away
        self._tell = tell
        self.cut = False

    async def _fault(self, operation: Operation, path: str) -> StoreFault | None:
        await self._clock.sleep(self._random.random() * STORE_LATENCY_S)
        return await super()._fault(operation, path)

    def _weather(self, operation: Operation, path: str) -> StoreFault | None:
        odds, dice = self._odds(), self._random.random()
        if self.cut or self._is_away():
            return StoreFault.HANGING if dice < 0.5 else StoreFault.UNAVAILABLE
        if dice >= odds.store:
            return None
        fault = self._random.choice(odds.store_faults)
        self._tell("store_fails", fault=fault.value, operation=operation, path=path)
        return fault


class StormSite(Site):
    """What one process stands on in bad weather."""

    bus: StormBus
    store: StormStore
    clock: PeerClock
    killed = False

    @property
    def has_run(self) -> bool:
        """Whether the broker has the run's settings, which ``recover`` puts last."""
        run = self.bus.peek()
        return run is not None and run.buckets[Bucket.RUN].get(SPEC_KEY) is not None

    def heal(self) -> None:
        """Broker and store can be reached again."""
        self.bus.line.heal()
        self.store.cut = self.killed

    def kill(self) -> None:
        """The process is gone without a word, frozen or not."""
        super().kill()
        self.killed = True
        self.store.cut = True
        self.clock.thaw()


class Storm(World):
    """A world whose faults follow from a plan."""

    def __init__(self, plan: Plan, directory: Path, trace: Trace) -> None:
        super().__init__(plan.spec, directory)
        self.plan = plan
        self.trace = trace
        self.rages = True
        """Small faults happen."""
        self.broker_is_up = True
        self.recovering = False
        self.stores_away = 0
        """Outages of the store that go on."""
        self.happened: list[Kind] = []
        self._processes = 0
        self._operator: StormSite | None = None

    async def create(self) -> None:
        """Create the run, with its settings in the bucket, where ``recover`` reads them."""
        await super().create()
        creator = Identity.deterministic("operator")
        await store_settings(self.store(), self.spec, creator)
        state = RunState(
            spec_json=self.spec.model_dump_json(), spec_digest=self.spec.digest, creator=creator.node
        )
        await self.bus("creator").put(Bucket.RUN, SPEC_KEY, encode(state, creator))

    def operator(self) -> StormSite:
        """What the person who looks after the run stands on."""
        if self._operator is None:
            self._operator = self._site("operator")
        return self._operator

    @property
    def can_be_read(self) -> bool:
        """Whether the broker has the run, with all that ``recover`` restores."""
        return self.operator().has_run and not self.recovering

    def odds(self) -> Odds:
        """How likely small faults are right now."""
        return self.plan.odds if self.rages else CALM

    def start(self, role: str, name: str) -> Peer:
        """One more process."""
        start: Callable[[str], Peer] = getattr(self, role)
        return start(name)

    def _site(self, name: str) -> StormSite:
        self._processes += 1
        seed, tell = f"{self.plan.seed}/{name}/{self._processes}", self.trace.teller(name)
        machine: Machine = machine_of(self.plan.seed, name)
        clock = PeerClock(machine.rate, machine.ahead_s)
        bus = StormBus(
            self.broker,
            self.spec.name,
            name,
            self.seen,
            clock,
            lambda bus: Line(f"{seed}/line", self.odds, clock, bus.reconnected, tell),
        )
        bus.line.broker_is_up = self.broker_is_up
        if not self.broker_is_up:
            bus.line.lose()
        cache = EntryCache(self._directory / f"{self._processes}")
        store = StormStore(
            self.bucket, cache, clock, f"{seed}/store", self.odds, lambda: self.stores_away > 0, tell
        )
        return StormSite(bus, store, clock)
