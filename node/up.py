"""``up``: a real run on this machine, through the same processes as on many."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from node.plot import save_curve
from node.runs import pin_run_off_loop
from node.settings import Environment
from node.stores import FilePlace, open_store, store_place
from node.swarm import Peer, Swarm, open_swarm
from protocol.errors import StoreNotFound
from protocol.messages import Head
from protocol.runspec import RunSpec


class Audience(Protocol):
    """Whoever watches."""

    def say(self, text: str) -> None:
        """One line that stays."""
        ...

    def show(self, swarm: Swarm) -> None:
        """The swarm as it is now."""
        ...


async def bring_up(
    environment: Environment, spec: RunSpec, directory: Path, peers: Sequence[Peer], audience: Audience
) -> dict[str, object]:
    """Run until the last update; returns what happened. The same call later continues the run."""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    audience.say(f"reading model and tasks of run {spec.name}")
    pinned = await pin_run_off_loop(spec, environment.places.models, checked=True)
    async with open_swarm(pinned, environment, directory, peers) as swarm:
        audience.say(f"started {', '.join(swarm.alive)}; logs in {directory / 'logs'}")
        shower = asyncio.create_task(swarm.show_to(audience.show))
        try:
            await swarm.finished()
        finally:
            shower.cancel()
        head = await swarm.head()
        adapter = await _adapter(swarm, head, directory / "cache") if head else ""
    progress = swarm.progress
    picture = save_curve(directory / "curve.png", progress.rewards, progress.evals, "reward")
    audience.say(f"reward {progress.reward_first:.3f} -> {progress.reward:.3f}; curve in {picture}")
    audience.say(f"adapter: {adapter}")
    return {
        "reward_first": progress.reward_first,
        "reward_last": progress.reward,
        "evals": progress.evals,
        "updates": head.count if head else 0,
        "groups_trained": head.groups_trained if head else 0,
        "groups_dropped": head.groups_dropped if head else {},
        "staleness_max": progress.staleness_max,
        "adapter": adapter,
        "curve": progress.rewards,
    }


async def _adapter(swarm: Swarm, head: Head, cache: Path) -> str:
    """The directory of the adapter that a run ended with: in a shared directory as it lies there, else a
    copy; empty if there is none."""
    path = f"{swarm.spec.name}/exports/{head.clock.digest}"
    place = store_place(swarm.spec.store)
    if isinstance(place, FilePlace):
        return str(place.root / path)
    try:
        return str(await open_store(swarm.spec.store, cache, swarm.bus).fetch(path))
    except StoreNotFound:
        return ""
