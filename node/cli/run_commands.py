"""Commands about runs: play a role, create a run, bring one up on this machine, see how it stands."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from node.cli import node_options as options
from node.settings import (
    ROWS_MAX,
    Environment,
    NodeSettings,
    Role,
    free_threads,
    prepare_process,
    read_environment,
)
from protocol.errors import OperatorError

if TYPE_CHECKING:
    from node.nats_bus import NatsBus
    from protocol.runspec import RunSpec

BrokerOption = Annotated[
    str | None, typer.Option(help="Broker, for example nats://host:4222. [env: GRPO_BROKER]")
]
TokenOption = Annotated[str | None, typer.Option(help="Token the broker asks for. [env: GRPO_TOKEN]")]

CreateBucketOption = Annotated[
    bool,
    typer.Option("--create-bucket", help="Make the bucket of an hf:// store, private, if it is not there."),
]


def play(
    *,
    roles: tuple[str, ...],
    run: str | None,
    broker: str | None,
    token: str | None,
    name: str | None,
    device: str,
    threads: int | None,
    sampler: options.SamplerOptions,
    grace_s: float,
    log_level: str,
    allow_modules: tuple[str, ...],
    wait: bool,
    join: str | None,
    allowed_paths: tuple[Path, ...],
) -> None:
    """Be a node of a run until it ends or somebody stops it."""
    from node.invitation import Invitation
    from node.joining import invited

    environment = read_environment()
    _set_up_logs(log_level)
    invitation = Invitation.parse(word) if (word := join or environment.join) else None
    if invitation is not None:
        roles, name = invited(invitation, roles, run, name)
        run, broker = invitation.run, broker or invitation.url
    settings = NodeSettings(
        run=_required(run, "--run NAME says which run to join"),
        roles=cast("tuple[Role, ...]", roles),
        broker=_broker(broker, environment),
        token=token or environment.token,
        name=name,
        device=device,
        threads=free_threads(environment) if threads is None else threads,
        rows_max=sampler.rows,
        engine=sampler.engine,
        vllm=sampler.vllm,
        grace_s=grace_s,
        places=environment.places,
        allow_modules=allow_modules,
        wait=wait,
        way=environment.way,
        invitation=invitation,
        allowed_paths=allowed_paths,
        identity_seed=environment.identity_seed,
    )
    prepare_process(settings.threads or 1)
    from node.runtime import run_until_stopped
    from node.wiring import build_node
    from roles.ring import until

    async def main(stop: asyncio.Event) -> None:
        node = await until(stop, build_node(settings))
        if node is not None:
            await node.run(stop)

    sys.exit(run_until_stopped(main, grace_s=grace_s))


def create(
    file: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    create_bucket: CreateBucketOption = False,
    broker: BrokerOption = None,
    token: TokenOption = None,
) -> None:
    """Check a run file, pin what it names, and store the run so that nodes can join it."""
    from node.consent import modules_of
    from node.runs import create_run, pin_run, read_run_file

    environment = read_environment()
    url = _broker(broker, environment)
    spec = pin_run(read_run_file(file), environment.places.models, checked=True)

    async def work() -> bool:
        from node.identity_file import load_or_create_identity

        if create_bucket:
            await _make_bucket(spec)
        async with connected(url, token, environment, spec.name) as bus:
            identity = load_or_create_identity(environment.places.home / "operator.nk", "operator")
            return await create_run(bus, spec, identity, environment.places.home / "cache")

    created = asyncio.run(work())
    print(f"run {spec.name} {'created' if created else 'is there already, with the same settings'}")
    trusted = "".join(f" --allow-module {module}" for module in modules_of(spec, "sampler"))
    print(f"join it anywhere: grpo-node --role sampler --run {spec.name} --broker {url}{trusted}")


def up(
    file: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    learners: Annotated[int, typer.Option(min=1, help="Learner processes.")] = 1,
    samplers: Annotated[int, typer.Option(min=1, help="Sampler processes.")] = 1,
    verifiers: Annotated[int, typer.Option(min=1, help="Verifier processes.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each peer; default: the cores are divided.")
    ] = None,
    rows: options.RowsOption = ROWS_MAX,
    engine: options.EngineOption = None,
    vllm_command: options.VllmCommandOption = None,
    vllm_url: options.VllmUrlOption = None,
    vllm_adapters: options.VllmAdaptersOption = None,
    create_bucket: CreateBucketOption = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where broker, logs and curve go. [default: .grpo/NAME]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object.")] = False,
) -> None:
    """Train a run on this machine: broker, learner, sampler and verifier as separate processes.

    Stopped and started again, it continues where it was.
    """
    from node.cli.show import Shower, run_shown
    from node.runs import read_run_file
    from node.swarm import peers_for
    from node.up import bring_up

    sampler = options.SamplerOptions.of(rows, engine, vllm_command, vllm_url, vllm_adapters)
    environment = read_environment()
    spec = read_run_file(file)
    place = directory or Path(".grpo") / spec.name
    peers = peers_for(learners, samplers, verifiers, environment, threads, sampler.words)

    async def work(shower: Shower) -> dict[str, object]:
        if create_bucket:
            await _make_bucket(spec)
        return await bring_up(environment, spec, place, peers, shower)

    outcome = run_shown(
        work,
        as_json=as_json,
        when_stopped="nothing is lost: the same command continues",
    )
    if as_json:
        print(json.dumps(outcome))


def status(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    broker: BrokerOption = None,
    token: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show who is alive, what is in flight, and how far the run is."""
    from node.status import read_status, status_lines

    environment = read_environment()

    async def work() -> dict[str, object]:
        async with connected(broker, token, environment, run) as bus:
            return await read_status(bus, run)

    found = asyncio.run(work())
    print(json.dumps(found) if as_json else "\n".join(status_lines(found)))


@asynccontextmanager
async def connected(
    broker: str | None, token: str | None, environment: Environment, run: str
) -> AsyncIterator[NatsBus]:
    """A bus for an operator's command; options come before the environment. Raises OperatorError."""
    from node.joining import broker_access
    from node.nats_bus import NatsBus

    access = broker_access(_broker(broker, environment), token or environment.token, environment.way)
    bus = await NatsBus.connect(access, run, node="operator")
    try:
        yield bus
    finally:
        await bus.close()


async def _make_bucket(spec: RunSpec) -> None:
    """Make the bucket of a run's store. Raises OperatorError if the store is no bucket, StoreError."""
    from node.stores import create_bucket

    made = await create_bucket(spec.store)
    print(f"bucket of {spec.store.url}: {'made, private' if made else 'there already'}", file=sys.stderr)


def _set_up_logs(level: str) -> None:
    from node.telemetry import LEVELS, set_up_logs

    if level not in LEVELS:
        raise OperatorError(f"--log is one of {', '.join(LEVELS)}, not {level!r}")
    set_up_logs(level)


def _broker(given: str | None, environment: Environment) -> str:
    return _required(given or environment.broker, "--broker URL (or GRPO_BROKER) says where the broker is")


def _required(value: str | None, what: str) -> str:
    if not value:
        raise OperatorError(what)
    return value
