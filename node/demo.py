"""The demo: a whole swarm on this machine learns to sort digits, and loses a sampler on the way.

No account, no download, no GPU. Everything is the real thing: separate processes, a real broker, a
real adapter store on disk, a real LoRA on a (tiny) real transformer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from node.runs import pin_run_off_loop
from node.settings import Environment
from node.stores import open_store
from node.swarm import Peer, Swarm, open_swarm, peers_for
from protocol.errors import OperatorError
from protocol.messages import Head
from protocol.runspec import RunSpec

KILL_AT = 0.3
"""Share of the updates after which a sampler is killed."""

VICTIM = "sampler-1"
REPLACEMENT = "sampler-3"

RUN_FILE = """
name = "demo"
seed = {seed}
rewards = [{{ name = "exact" }}]

[model]
ref = "builtin:tiny-{seed}"

[lora]
rank = 4
alpha = 8

[tasks]
source = "builtin:sort-digits"
template = "{{prompt}}"
held_out = 512

[sampling]
group_size = 8
max_new_tokens = 5
ack_wait_s = 6
deadline_s = 60

[learner]
updates = {updates}
groups_per_update = 16
learning_rate = 3e-3
schedule = "linear"
beta2 = 0.99
state_every = 10
export_every = 0

[loss]
advantage_scale = "none"

[staleness]
max_staleness = 4

[eval]
every = 100
problems = 128
completions_per_problem = 4

[store]
url = "{store}"
"""

Say = Callable[[str], None]


@dataclass
class DemoResult:
    """What ``--json`` prints; rewards are success rates in [0, 1]."""

    reward_first: float
    reward_last: float
    eval_first: float
    eval_last: float
    updates: int
    groups_trained: int
    groups_dropped: dict[str, int]
    groups_trained_twice: int
    staleness_max: float
    ratio_deviation_max: float
    blocked_share: float
    killed: list[str]
    wall_s: float
    train_s: float
    adapter: str
    curve: list[float] = field(repr=False)
    evals: list[tuple[float, float]] = field(repr=False)


def demo_spec(seed: int, updates: int, store: Path) -> RunSpec:
    """The demo's run; also a good first run file to read."""
    text = RUN_FILE.format(seed=seed, updates=updates, store=store.resolve().as_uri())
    return RunSpec.from_toml(text, "demo")


async def run_demo(
    environment: Environment,
    directory: Path,
    *,
    seed: int,
    updates: int,
    say: Say,
    show: Callable[[Swarm], None],
) -> DemoResult:
    """Run the demo below ``directory``; ``show`` is called about once a second with the swarm."""
    started = time.monotonic()
    if await asyncio.to_thread((directory / "broker").exists):
        raise OperatorError(f"--dir {directory}: an earlier demo lies there; choose another --dir")
    say("making the tiny model (first time only) and the task set")
    spec = await pin_run_off_loop(demo_spec(seed, updates, directory / "store"), environment.places.models)
    peers = [_sized(peer) for peer in peers_for(1, 2, 1, environment)]
    async with open_swarm(spec, environment, directory, peers) as swarm:
        say(f"broker and peers are starting: {', '.join(swarm.alive)}")
        async with asyncio.TaskGroup() as group:
            aside = [group.create_task(_sabotage(swarm, say)), group.create_task(swarm.show_to(show))]
            await swarm.finished()
            for task in aside:
                task.cancel()
        show(swarm)
        head = await swarm.head()
    if head is None:
        raise OperatorError("the demo ended before its first update; the logs lie beside its store")
    return await _result(swarm, head, directory, time.monotonic() - started)


def _sized(peer: Peer) -> Peer:
    """Small batches, so that both samplers get their share."""
    return replace(peer, options=("--rows", "64")) if "sampler" in peer.roles else peer


async def _sabotage(swarm: Swarm, say: Say) -> None:
    """Kill a sampler once the run is well on its way, and start another under a new name."""
    moment = KILL_AT * swarm.spec.learner.updates
    await swarm.until(lambda progress: progress.version >= moment)
    victim = swarm.kill(VICTIM)
    say(f"killed {VICTIM} with SIGKILL, as a power cut would; starting {REPLACEMENT}")
    await swarm.start(replace(victim, name=REPLACEMENT))


async def _result(swarm: Swarm, head: Head, directory: Path, wall_s: float) -> DemoResult:
    progress, spec = swarm.progress, swarm.spec
    if not progress.evals:
        raise OperatorError(f"no evaluation came back; look into {directory / 'logs'}")
    evals = sorted(progress.evals)
    return DemoResult(
        reward_first=round(progress.reward_first, 4),
        reward_last=round(progress.reward, 4),
        eval_first=round(evals[0][1], 4),
        eval_last=round(evals[-1][1], 4),
        updates=head.count,
        groups_trained=head.groups_trained,
        groups_dropped=dict(head.groups_dropped),
        groups_trained_twice=await trained_twice(spec, directory / "cache"),
        staleness_max=progress.staleness_max,
        ratio_deviation_max=progress.ratio_deviation_max,
        blocked_share=progress.blocked_s / progress.step_s if progress.step_s else 0.0,
        killed=swarm.killed,
        wall_s=round(wall_s, 2),
        train_s=round(progress.last_at - progress.first_at, 2),
        adapter=str(directory / "store" / spec.name / "exports" / head.clock.digest),
        curve=[round(reward, 4) for reward in progress.rewards],
        evals=[(version, round(reward, 4)) for version, reward in evals],
    )


async def trained_twice(spec: RunSpec, cache: Path) -> int:
    """Groups that more than one update in the store claims to have trained on."""
    store = open_store(spec.store, cache)
    counts: Counter[str] = Counter()
    for path in await store.list(f"{spec.name}/updates"):
        counts.update((await store.manifest(path)).groups)
    return sum(count > 1 for count in counts.values())
