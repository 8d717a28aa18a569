"""Who plays in a storm: processes by name, and which of their ends are allowed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator

from protocol.errors import FencedError
from tests.sim.storm import Storm, StormSite
from tests.sim.swarm import Peer


class Cast:
    """The processes of a storm. A process ends by itself when the run does, or because somebody ends it."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self._processes: defaultdict[str, list[Peer]] = defaultdict(list)
        self._joined = 0
        self.broken: list[str] = []
        """Ends that no peer may come to."""

    def start(self, role: str, name: str = "") -> None:
        """One more process; without a name it is a peer that was never there before."""
        if not name:
            self._joined += 1
            name = f"{role}-{10 + self._joined}"
        peer = self._storm.start(role, name)
        self._processes[name].append(peer)
        self._storm.trace.add(name, "process_started")
        peer.work.add_done_callback(lambda _: self._ended(peer))

    def running(self, name: str = "") -> list[Peer]:
        """Processes that have not ended, of one peer or of all; the newest comes last."""
        names = [name] if name else list(self._processes)
        return [peer for each in names for peer in self._processes[each] if not peer.work.done()]

    def sites(self) -> Iterator[StormSite]:
        """What the running processes stand on."""
        for peer in self.running():
            yield site_of(peer)

    async def end(self) -> None:
        """Kill whatever still runs."""
        for peer in self.running():
            await peer.crash()

    def _ended(self, peer: Peer) -> None:
        if peer.work.cancelled() or site_of(peer).killed:
            self._storm.trace.add(peer.name, "process_killed")
            return
        exc = peer.work.exception()
        if exc is None:
            self._storm.trace.add(peer.name, "process_ended")
            return
        causes = [str(cause) or type(cause).__name__ for cause in leaves(exc)]
        self._storm.trace.add(peer.name, "process_failed", why="; ".join(causes))
        replaced = len(self._processes[peer.name]) > 1
        if not (replaced and all(isinstance(cause, FencedError) for cause in leaves(exc))):
            self.broken.append(f"{peer.name} ended with: {'; '.join(causes)}")


def site_of(peer: Peer) -> StormSite:
    """What a process in a storm stands on."""
    assert isinstance(peer.site, StormSite)
    return peer.site


def leaves(exc: BaseException) -> list[BaseException]:
    """The errors inside groups of errors."""
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for each in exc.exceptions for leaf in leaves(each)]
    return [exc]


async def ended(peer: Peer) -> None:
    """Wait until a process has ended, however."""
    await asyncio.wait({peer.work})
