"""``grpo-node recover``: rebuild a run at a broker that lost it, from the run's store."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.run_commands import BrokerOption, TokenOption, connected
from node.settings import read_environment
from protocol.errors import OperatorError

if TYPE_CHECKING:
    from node.recover import Recovered
    from protocol.store_spec import StoreSpec


def recover(
    file: Annotated[Path | None, typer.Argument(help="The run file; or give --run and --store.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    store: Annotated[str | None, typer.Option(help="The run's store: a directory or its URL.")] = None,
    broker: BrokerOption = None,
    token: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Rebuild a run at a broker that lost its disk, from the store alone. Peers that live go on."""
    from node.identity_file import load_or_create_identity
    from node.recover import recover_run
    from node.stores import open_store

    environment = read_environment()
    name, spec = _what(file, run, store)
    home = environment.places.home

    async def work() -> Recovered:
        identity = load_or_create_identity(home / "operator.nk", "operator")
        async with connected(broker, token, environment, name) as bus:
            opened = open_store(spec, home / "cache", bus)
            return await recover_run(bus, opened, name, identity)

    found = asyncio.run(work())
    if as_json:
        print(json.dumps({"run": name, **asdict(found)}))
        return
    for line in _lines(name, found):
        print(line)


def _what(file: Path | None, run: str | None, store: str | None) -> tuple[str, StoreSpec]:
    """The run's name and its store."""
    from node.runs import located_store, read_run_file
    from protocol.store_spec import StoreSpec

    if file is not None and run is None and store is None:
        spec = read_run_file(file)
        return spec.name, located_store(spec.store)
    if file is None and run and store:
        return run, located_store(StoreSpec(url=store))
    raise OperatorError("recover wants a run file, or --run NAME together with --store URL")


def _lines(run: str, found: Recovered) -> list[str]:
    learners = ", ".join(f"{learner} at {count}" for learner, count in sorted(found.learners.items()))
    lines = [
        f"run {run} is back: version {found.version:g}, learners: {learners or 'none had published'}",
        f"{found.groups_trained} groups trained; {found.groups_recognised} are recognised if they come again",
        "learners issue again what was on its way, those that live at once, others when they start",
    ]
    if found.audited:
        lines.append(
            "standings of samplers lay at the broker alone: verifiers that live say them again, others audit "
            f"everybody anew; see: grpo-node audit list --run {run}"
        )
    if found.uncertain:
        uploads = ", ".join(found.uncertain)
        lines.append(
            f"left aside, for they contradict each other (a living author commits its own): {uploads}"
        )
    return lines
