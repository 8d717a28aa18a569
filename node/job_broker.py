"""What a broker's job does: serve the run to its network group and to outsiders, until the run is finished.

Its disk ends with it. So it makes the run from the run file the first time, and brings it back from the
store every other time, with whatever the first time pinned.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import structlog

from node.broker import Broker, start_broker
from node.broker_access import BrokerAccess
from node.broker_accounts import Accounts
from node.broker_config import BrokerOptions, Doors
from node.identity_file import own_identity
from node.job_logins import every_guest, read_keys
from node.nats_bus import NatsBus
from node.recover import create_or_recover, read_spec
from node.runs import check_same, located_store, pin_run_off_loop
from node.settings import ENV_BROKER_KEYS, Environment
from node.stores import create_store, open_store
from protocol.errors import BusError, OperatorError
from protocol.runspec import RunSpec
from protocol.subjects import FINISHED_KEY, Bucket
from roles.ring import until

EVERYWHERE = "0.0.0.0"  # noqa: S104 a job is reached from elsewhere or not at all
CHECK_S = 2.0
LINGER_S = 60.0
"""How long peers may take to leave a finished run."""
OPERATOR = "operator"

log = structlog.get_logger("broker")


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a job's broker listens: on all interfaces, for whoever has a login."""

    port: int
    websocket: int | None

    def options(self) -> BrokerOptions:
        """nats-server's settings. TLS is the Hub's proxy's part; inside the network group there is none, and
        logins need none: nothing secret is sent."""
        websocket = None if self.websocket is None else (EVERYWHERE, self.websocket)
        return BrokerOptions(host=EVERYWHERE, accounts=True, doors=Doors(websocket=websocket))


def start_open_broker(environment: Environment, listening: Listening, run: str) -> Broker:
    """A broker that others reach, with an account for each node of ``run`` that jobs may ever be.

    Raises OperatorError without the keys that made their logins.
    """
    if not environment.broker_keys:
        raise OperatorError(f"{ENV_BROKER_KEYS} is not set; `grpo-node jobs up` gives it to the broker's job")
    place, keys = environment.places.broker("job"), read_keys(environment.broker_keys)
    Accounts.open(place, keys).admit(every_guest(keys, run))
    return start_broker(
        place, port=listening.port, binary=environment.nats_server, options=listening.options()
    )


async def serve(
    broker: Broker, environment: Environment, spec: RunSpec, port: int, stop: asyncio.Event
) -> bool:
    """Bring the run up at ``broker`` and wait until it is finished; False if ``stop`` came first.

    Raises OperatorError for a run file that cannot be used, or that is not the one of the run of its name.
    """
    identity = await asyncio.to_thread(
        own_identity, environment.places.home / "operator.nk", OPERATOR, environment.identity_seed
    )
    pinned = await _pinned(spec, environment)
    access = replace(broker.access, url=f"nats://127.0.0.1:{port}")
    async with _bus(access, spec.name) as bus:
        await create_or_recover(bus, pinned, identity, environment.places.home / "cache")
        log.info("run_served", run=spec.name, spec=pinned.digest)
        finished = await until(stop, _finished(bus, broker))
        if finished:
            log.info("run_is_finished", run=spec.name)
            await until(stop, _all_gone(bus))
    return bool(finished)


async def _pinned(spec: RunSpec, environment: Environment) -> RunSpec:
    """As the run was pinned when it began; if it has not begun, as this machine sees model and tasks.

    Raises OperatorError if the run of this name in the store has other settings.
    """
    located = spec.model_copy(update={"store": located_store(spec.store)})
    await create_store(located.store)
    store = open_store(located.store, environment.places.home / "cache")
    if any(path.startswith(f"{spec.name}/run-") for path in await store.list(spec.name)):
        found = await read_spec(store, spec.name)
        check_same(with_pins_of(located, found), found.digest)
        return found
    return await pin_run_off_loop(spec, environment.places.models, checked=True)


def with_pins_of(spec: RunSpec, pinned: RunSpec) -> RunSpec:
    """``spec`` with the revision and digests of ``pinned`` where it leaves them open."""

    def filled(own: object, other: object, names: Sequence[str]) -> dict[str, object]:
        return {name: getattr(own, name) or getattr(other, name) for name in names}

    model = filled(spec.model, pinned.model, ("revision", "config_digest", "tokenizer_digest"))
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update=model),
            "tasks": spec.tasks.model_copy(update=filled(spec.tasks, pinned.tasks, ("digest",))),
        }
    )


async def _finished(bus: NatsBus, broker: Broker) -> bool:
    while broker.alive:
        try:
            if await bus.get(Bucket.RUN, FINISHED_KEY) is not None:
                return True
        except BusError as exc:
            log.warning("broker_does_not_answer", error=str(exc) or type(exc).__name__)
        await asyncio.sleep(CHECK_S)
    raise OperatorError(f"nats-server ended by itself; its log lies in {broker.state_dir}")


async def _all_gone(bus: NatsBus) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await bus.list(Bucket.NODE, "node"):  # noqa: ASYNC110 presence expires without telling
                await asyncio.sleep(CHECK_S)


@asynccontextmanager
async def _bus(access: BrokerAccess, run: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(access, run, node=OPERATOR)
    try:
        yield bus
    finally:
        await bus.close()
