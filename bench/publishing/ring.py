"""A run whose publishing is measured: all roles real, each a process of its own, one store and one rank.

learner, verifier, sampler-1 ─ warm-up ─ measured updates ─ sampler-2 … sampler-8 join ─ measured updates
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.publishing.timeline import Timeline, Window
from node.children import last_words
from node.runs import pin_run_off_loop
from node.settings import Places, read_environment
from node.stores import create_bucket
from node.swarm import Peer, Swarm, open_swarm
from protocol.codec import decode_as
from protocol.messages import Event
from protocol.runspec import RunSpec

PATIENCE_S = 240.0
"""For one stretch of updates; a run that stands still is told, not waited for."""
LOOK_S = 5.0
"""How often peers are looked after while nothing is told."""
GRACE_S = 1.0
"""Peers that measured enough need not finish what they have in hand."""
WARM_UP = 1
"""Updates before those that count: the first opens connections and imports clients."""

STORES = {"file": "file://{directory}/store", "nats": "nats://", "hub": "hf://buckets/alice/publish"}

RUN_FILE = """
name = "publish-{store}-r{rank}"
rewards = [{{ name = "bench.publishing.reward:unlike" }}]

[model]
ref = "{model}"

[lora]
rank = {rank}
alpha = {alpha}

[tasks]
{tasks}

[sampling]
group_size = {rows}
max_new_tokens = {tokens}

[learner]
updates = 1000000
groups_per_update = {groups}
learning_rate = 1e-5
export_every = 0
state_every = 1000000

[eval]
every = 0
problems = 0

[store]
url = "{url}"
"""

SUMS = """source = "examples/arithmetic.jsonl"
held_out = 24
template = "{prompt} ="
"""
DIGITS = """source = "builtin:sort-digits"
template = "{prompt}"
held_out = 512
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What a run does besides publishing, in numbers."""

    model: Path
    tiny: bool = False
    """The model is the built-in one."""
    groups: int = 4
    """Of an update."""
    rows: int = 4
    """Of a group."""
    tokens: int = 32
    batch: int = 4
    """Groups that a sampler decodes at a time."""
    updates: int = 2
    """Measured ones, with each number of samplers."""


Done = Callable[[Timeline, int, Window], None]


class Run:
    """A run with a learner and a verifier, and samplers as they come. Use ``open_run``."""

    def __init__(self, swarm: Swarm, load: Load) -> None:
        self.timeline = Timeline()
        self._swarm, self._load = swarm, load
        self._samplers: tuple[str, ...] = ()
        self._news = asyncio.Condition()

    async def listen(self) -> None:
        """Note what the peers tell, for ever."""
        async for frame in self._swarm.bus.events(replay=True):
            async with self._news:
                self.timeline.take(decode_as(frame, Event))
                self._news.notify_all()

    async def grow(self, count: int) -> None:
        """Start samplers until there are so many, and wait until each has sampled something."""
        new = tuple(f"sampler-{number + 1}" for number in range(len(self._samplers), count))
        self._samplers += new
        rows = str(self._load.batch * self._load.rows)
        for name in new:
            await self._swarm.start(Peer(name, ("sampler",), options=("--rows", rows)))
        await self._until(lambda: self.timeline.has_sampled(self._samplers, 0))

    async def stretch(self) -> Window:
        """Let the measured updates pass; ends when the last of them is everywhere."""
        first = self.timeline.version + WARM_UP + 1
        window = Window(first, first + self._load.updates - 1, self._samplers)
        await self._until(lambda: self._is_over(window))
        return window

    def _is_over(self, window: Window) -> bool:
        """Whether all samplers serve its last version and have sampled under it, or had the time to."""
        timeline, everybody = self.timeline, window.samplers
        if timeline.version < window.last or not timeline.has_loaded(everybody, window.last):
            return False
        return timeline.has_sampled(everybody, window.last) or timeline.version > window.last + 1

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of the timeline. Leaves if a peer died or nothing moves any more."""
        names = ("learner-1", "verifier-1", *self._samplers)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await self._soon(holds):
                    if gone := set(names) - set(self._swarm.alive):
                        raise SystemExit(f"{min(gone)} died:\n{self._last_words(min(gone))}")
        except TimeoutError:
            words = "\n".join(f"{name}:\n{self._last_words(name)}" for name in names)
            raise SystemExit(f"the run stands still\n{words}") from None

    async def _soon(self, holds: Callable[[], bool]) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S), self._news:
                return await self._news.wait_for(holds)
        return False

    def _last_words(self, name: str) -> str:
        return last_words(self._swarm.log(name))


async def measure(load: Load, store: str, rank: int, samplers: Sequence[int], done: Done) -> None:
    """One run, with so many samplers one after the other; ``done`` gets what was told so far, how many there
    are, and which versions count."""
    with tempfile.TemporaryDirectory(prefix="grpo-publish-") as directory:
        async with open_run(load, store, rank, Path(directory)) as run:
            for count in samplers:
                await run.grow(count)
                window = await run.stretch()
                done(run.timeline, count, window)


@contextlib.asynccontextmanager
async def open_run(load: Load, store: str, rank: int, directory: Path) -> AsyncIterator[Run]:
    """A learner and a verifier on a broker of their own; all of it ends with the body."""
    text = RUN_FILE.format(
        store=store,
        rank=rank,
        alpha=2 * rank,
        model=load.model,
        tasks=DIGITS if load.tiny else SUMS,
        rows=load.rows,
        tokens=load.tokens,
        groups=load.groups,
        url=STORES[store].format(directory=directory),
    )
    environment = replace(read_environment(), places=Places(directory / "home"))
    spec = await pin_run_off_loop(RunSpec.from_toml(text, "bench"), environment.places.models)
    if store == "hub":
        await create_bucket(spec.store)
    peers = [Peer("learner-1", ("learner",)), Peer("verifier-1", ("verifier",))]
    async with open_swarm(spec, environment, directory / "swarm", peers, GRACE_S) as swarm:
        run = Run(swarm, load)
        listening = asyncio.create_task(run.listen())
        try:
            yield run
        finally:
            listening.cancel()
