"""``grpo-node audit``: see why verifiers judged a sampler, and lift it; ``grpo-node calibrate``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from node.cli.run_commands import BrokerOption, TokenOption, connected
from node.settings import prepare_process, read_environment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from protocol.messages import Standing
    from roles.standings import Standings

T = TypeVar("T")

app = typer.Typer(help="See which samplers verifiers judged, why, and lift it.", no_args_is_help=True)

NodeArgument = Annotated[str, typer.Argument(help="The sampler's name, or its public key.")]
RunOption = Annotated[str, typer.Option(help="Name of the run.")]


@app.command("list")
def list_judged(
    run: RunOption,
    broker: BrokerOption = None,
    token: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List every sampler that was judged."""
    from node.audits import revoke_lines

    async def work(standings: Standings) -> list[Standing]:
        return standings.all

    found = _with_standings(run, broker, token, work)
    for one in found:
        line = f"{one.node:<20} {one.judgement.value:<12} by {one.judge}: {one.reason}"
        print(_as_json(one) if as_json else line)
    if as_json:
        return
    for line in revoke_lines(found) if found else ["no sampler was judged"]:
        print(line)


@app.command("show")
def show(
    node: NodeArgument,
    run: RunOption,
    broker: BrokerOption = None,
    token: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show why a sampler was judged: groups, numbers, clocks, rollouts."""
    from node.audits import standing_lines, standing_of

    async def work(standings: Standings) -> Standing:
        return standing_of(standings, node)

    standing = _with_standings(run, broker, token, work)
    print(_as_json(standing) if as_json else "\n".join(standing_lines(standing)))


@app.command("lift")
def lift_quarantine(
    node: NodeArgument, run: RunOption, broker: BrokerOption = None, token: TokenOption = None
) -> None:
    """Let a judged sampler work again. Its evidence stays; it is audited like a new one."""
    from node.audits import lift

    async def work(standings: Standings) -> Standing:
        return await lift(standings, node, "operator")

    standing = _with_standings(run, broker, token, work)
    print(f"{standing.node} may work again; start it anew if it has stopped")


def calibrate(
    file: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    sampler_dtype: Annotated[
        str | None, typer.Option(help="dtype of the sampler's engine; default: the run's.")
    ] = None,
    groups: Annotated[int, typer.Option(min=20, help="Honest groups to measure.")] = 200,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Where the TOML table goes; default: the terminal.")
    ] = None,
) -> None:
    """Measure how far honest engines disagree, and write the tolerances of a run's [audit] table."""
    from node.runs import read_run_file

    environment = read_environment()
    prepare_process(environment.cores)
    from node.calibrate import measure, tolerance_table

    spec = read_run_file(file)
    found = asyncio.run(
        measure(
            spec,
            environment.places.models,
            sampler_dtype=sampler_dtype,
            groups=groups,
            device=device,
            threads=environment.cores,
        )
    )
    table = tolerance_table(found)
    if out is None:
        print(table)
    else:
        out.write_text(table, "utf-8")
        print(f"wrote {out}; put it into the run file")


def _with_standings(
    run: str, broker: str | None, token: str | None, work: Callable[[Standings], Awaitable[T]]
) -> T:
    from node.audits import read_standings
    from node.identity_file import load_or_create_identity

    environment = read_environment()

    async def main() -> T:
        identity = load_or_create_identity(environment.places.home / "operator.nk", "operator")
        async with connected(broker, token, environment, run) as bus:
            return await work(await read_standings(bus, run, identity))

    return asyncio.run(main())


def _as_json(standing: Standing) -> str:
    findings = [
        {
            "group": one.group_id,
            "engine": one.engine,
            "clock": one.clock.text,
            "flags": list(one.flags),
            "numbers": one.numbers,
        }
        for one in standing.findings
    ]
    plain = standing.model_dump(exclude={"findings"}, mode="json")
    return json.dumps(plain | {"findings": findings})
