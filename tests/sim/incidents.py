"""The large faults, one function each: something breaks, and some time later it is whole again."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from node.recover import recover_run
from protocol.errors import BusError, OperatorError, StoreError
from protocol.identity import Identity
from tests.sim.books import read_books
from tests.sim.cast import Cast, ended, site_of
from tests.sim.plan import Incident, Kind
from tests.sim.storm import Storm
from tests.sim.swarm import Peer

Handler = Callable[[Storm, Cast, Incident], Coroutine[Any, Any, None]]

RECOVER_AGAIN_S = 2.0
"""An operator whose command failed waits so long before typing it again."""


async def happen(storm: Storm, cast: Cast, incident: Incident) -> None:
    """Let one large fault happen at its time; returns when it is over."""
    await storm.clock.sleep(incident.at - storm.clock.monotonic())
    storm.trace.add(incident.who or "everybody", incident.kind.value, for_s=incident.for_s)
    storm.happened.append(incident.kind)
    await _HANDLERS[incident.kind](storm, cast, incident)


async def _crash(storm: Storm, cast: Cast, incident: Incident) -> None:
    for peer in _newest(cast, incident):
        await peer.crash()
        await storm.clock.sleep(incident.for_s)
        cast.start(peer.role, peer.name)


async def _leave(storm: Storm, cast: Cast, incident: Incident) -> None:
    for peer in _newest(cast, incident):
        peer.stop.set()
        await ended(peer)
        await storm.clock.sleep(incident.for_s)
        cast.start(peer.role, peer.name)


async def _freeze(storm: Storm, cast: Cast, incident: Incident) -> None:
    for peer in _newest(cast, incident):
        clock = site_of(peer).clock
        clock.freeze()
        await storm.clock.sleep(incident.for_s)
        clock.thaw()


async def _replace(storm: Storm, cast: Cast, incident: Incident) -> None:
    for peer in _newest(cast, incident):
        clock = site_of(peer).clock
        clock.freeze()
        cast.start(peer.role, peer.name)
        await storm.clock.sleep(incident.for_s)
        clock.thaw()


async def _join(_storm: Storm, cast: Cast, incident: Incident) -> None:
    cast.start(incident.who)


async def _cut(storm: Storm, cast: Cast, incident: Incident) -> None:
    for peer in _newest(cast, incident):
        site = site_of(peer)
        if incident.kind is not Kind.CUT_STORE:
            site.bus.line.cut()
        site.store.cut = incident.kind is not Kind.CUT_BROKER
        await storm.clock.sleep(incident.for_s)
        site.heal()


async def _restart_broker(storm: Storm, cast: Cast, incident: Incident) -> None:
    if storm.broker_is_up:
        await _without_broker(storm, cast, incident.for_s, storm.broker.restart)


async def _lose_disk(storm: Storm, cast: Cast, incident: Incident) -> None:
    if not storm.broker_is_up:
        return
    if storm.operator().bus.peek() is not None:
        books = read_books(storm)
        in_updates = {g for updates in books.updates.values() for update in updates for g in update.groups}
        storm.forgotten |= (books.dropped.keys() | books.dead.keys() | books.trained) - in_updates
        storm.trained_before |= in_updates
    await _without_broker(storm, cast, incident.for_s, storm.broker.lose_disk)
    operator = storm.operator()
    storm.recovering = True
    while True:
        await storm.clock.sleep(RECOVER_AGAIN_S)
        try:
            recovered = await recover_run(
                operator.bus, operator.store, storm.spec.name, Identity.deterministic("operator")
            )
        except (BusError, StoreError) as exc:
            storm.trace.add("operator", "recover_failed", why=str(exc))
        except OperatorError:
            if not operator.has_run:
                raise
            storm.recovering = False  # the last try did it, and its answer was lost
            return
        else:
            break
    storm.watch.uncertain |= set(recovered.uncertain)
    storm.recovering = False
    storm.trace.add(
        "operator", "recovered", learners=recovered.learners, uncertain=" ".join(recovered.uncertain)
    )


async def _without_broker(storm: Storm, cast: Cast, for_s: float, back: Callable[[], None]) -> None:
    storm.broker_is_up = False
    for site in cast.sites():
        site.bus.line.broker_gone()
    await storm.clock.sleep(for_s)
    back()
    storm.broker_is_up = True
    for site in cast.sites():
        site.bus.line.broker_back()


async def _store_outage(storm: Storm, _cast: Cast, incident: Incident) -> None:
    storm.stores_away += 1
    await storm.clock.sleep(incident.for_s)
    storm.stores_away -= 1


async def _redeliver(storm: Storm, _cast: Cast, _incident: Incident) -> None:
    run = storm.operator().bus.peek()
    for queue in run.queues.values() if run is not None else ():
        queue.expire()


def _newest(cast: Cast, incident: Incident) -> list[Peer]:
    """The process that runs under a name, if one does."""
    return cast.running(incident.who)[-1:]


_HANDLERS: dict[Kind, Handler] = {
    Kind.CRASH: _crash,
    Kind.FREEZE: _freeze,
    Kind.REPLACE: _replace,
    Kind.CUT_BROKER: _cut,
    Kind.CUT_STORE: _cut,
    Kind.CUT_BOTH: _cut,
    Kind.JOIN: _join,
    Kind.LEAVE: _leave,
    Kind.RESTART_BROKER: _restart_broker,
    Kind.LOSE_DISK: _lose_disk,
    Kind.STORE_OUTAGE: _store_outage,
    Kind.REDELIVER: _redeliver,
}
