"""``grpo-node jobs``: a swarm as Hugging Face Jobs, from one command to the last one cancelled."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.jobs_invite import invite
from node.cli.jobs_options import (
    FlavorOption,
    JobOptions,
    NamespaceOption,
    remembered,
    swarm_for,
)
from node.cli.jobs_show import as_objects, dry_run_lines, lines, summary
from node.job_templates import PORT, WEBSOCKET_PORT
from node.settings import Environment, read_environment, read_secret
from protocol.errors import OperatorError, one_line

if TYPE_CHECKING:
    from node.hub_jobs import HubJobs
    from node.job_plan import SwarmSecrets, SwarmSpec
    from node.job_swarm import Costs, JobSwarm

EXIT_STOPPED = 3
"""A broker's job that was ended before its run was: not the code of one that is finished."""
LOG_LINE_MAX = 4000

app = typer.Typer(help="Run a swarm as Hugging Face Jobs.", no_args_is_help=True)
app.command("invite")(invite)

RunArgument = Annotated[str, typer.Argument(help="Name of the run.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the exact requests and what they cost; send none.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def say(text: str) -> None:
    """A line about what happens."""
    print(text, file=sys.stderr, flush=True)


@app.command("up")
def up(
    file: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    learners: Annotated[int | None, typer.Option(min=0, help="Learner jobs. Default: 1.")] = None,
    samplers: Annotated[int | None, typer.Option(min=0, help="Sampler jobs. Default: 1.")] = None,
    verifiers: Annotated[int | None, typer.Option(min=0, help="Verifier jobs. Default: 1.")] = None,
    flavor: FlavorOption = None,
    install: Annotated[
        str | None, typer.Option(help="What pip installs on each job: a git URL, a wheel; none: nothing.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image of all jobs.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Hours after which the Hub ends a peer's job.")
    ] = None,
    mount: Annotated[
        list[str] | None, typer.Option(help="hf://…:/where[:ro|:rw] on every job. May be repeated.")
    ] = None,
    templates: Annotated[Path | None, typer.Option(help="Directory of templates: broker.toml…")] = None,
    new_logins: Annotated[
        bool, typer.Option("--new-logins", help="Make all logins anew, once no job lives: one was stolen.")
    ] = False,
    namespace: NamespaceOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Stay, and start again what dies.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks with --keep.")] = 30.0,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Start what is missing of a swarm: broker, learners, samplers, verifiers. Again is harmless."""
    options = JobOptions(
        learners,
        samplers,
        verifiers,
        tuple(flavor or ()),
        install,
        image,
        timeout,
        tuple(mount or ()),
        templates,
        new_logins,
    )
    environment = read_environment()
    try:
        asyncio.run(_up(environment, file, options, namespace, keep, every, dry_run, as_json))
    except KeyboardInterrupt:
        say("stopped watching; the jobs go on")


async def _up(
    environment: Environment,
    file: Path,
    options: JobOptions,
    namespace: str | None,
    keep: bool,
    every: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    from node.hub_jobs import HubJobs
    from node.job_keeper import JobKeeper
    from node.job_memory import remember
    from node.runs import read_run_file

    spec, text = read_run_file(file), await asyncio.to_thread(file.read_text, encoding="utf-8")
    options.check()
    hub = await HubJobs.open(environment.hub_endpoint, namespace)
    place = environment.places.jobs(hub.namespace, spec.name)
    swarm, own = swarm_for(spec, text, hub.namespace, options, place)
    jobs, price = await _planned(environment, hub, swarm, own, dry_run=dry_run, as_json=as_json)
    if dry_run:
        return
    remember(place, swarm, own)
    started = await jobs.start()
    print(json.dumps(as_objects(swarm, started, price)) if as_json else summary(swarm, price))
    if keep:
        await JobKeeper(hub, jobs, spec.name, say).keep(every)


async def _planned(
    environment: Environment,
    hub: HubJobs,
    swarm: SwarmSpec,
    own: SwarmSecrets,
    *,
    dry_run: bool,
    as_json: bool,
) -> tuple[JobSwarm, Costs]:
    """The jobs of a swarm, checked against those that live, and their price; a dry run prints what lacks."""
    from node.job_plan import HubTokens, plan
    from node.job_swarm import JobSwarm, costs

    writes = environment.jobs_hub_token or hub.token
    tokens = HubTokens(writes, environment.jobs_hub_read_token or writes)
    requests = plan(swarm, own, tokens, read_secret)
    price = costs(list(requests.values()), await hub.hardware())
    jobs = JobSwarm(hub, swarm, requests, say)
    missing = await jobs.missing()
    if dry_run:
        bodies = [hub.body(request) for request in missing]
        print("\n".join(dry_run_lines(hub.url(), bodies, len(requests), price, as_json=as_json)))
    return jobs, price


@app.command("status")
def status(run: RunArgument, namespace: NamespaceOption = None, as_json: Json = False) -> None:
    """Show every slot's job, its address from outside, and what all of it costs."""
    asyncio.run(_status(run, namespace, as_json))


async def _status(run: str, namespace: str | None, as_json: bool) -> None:
    from node.hub_jobs import HubJobs

    hub = await HubJobs.open(read_environment().hub_endpoint, namespace)
    jobs, hardware = await hub.jobs_of(run), await hub.hardware()
    print("\n".join(lines(run, jobs, hardware, as_json=as_json)))


@app.command("logs")
def logs(
    run: RunArgument,
    slot: Annotated[str | None, typer.Argument(help="broker, learner-1…; default: all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job ends; wants a slot.")] = False,
    tail: Annotated[int | None, typer.Option(min=1, help="Last lines only. Default: 20 of each.")] = None,
    namespace: NamespaceOption = None,
) -> None:
    """Show what the jobs wrote; of each slot the job that counts."""
    from node.hub_jobs import HubJobs, Job
    from node.job_swarm import current

    if follow and slot is None:
        raise OperatorError("--follow follows one job; name its slot: broker, learner-1…")

    async def found() -> tuple[HubJobs, dict[str, Job]]:
        hub = await HubJobs.open(read_environment().hub_endpoint, namespace)
        return hub, current(await hub.jobs_of(run))

    hub, jobs = asyncio.run(found())
    if slot is not None and slot not in jobs:
        there = ", ".join(sorted(jobs)) or "none"
        raise OperatorError(f"run {run} has no job {slot} in {hub.namespace}; there are: {there}")
    lines_each = tail if slot is not None else tail or 20
    try:
        for name in [slot] if slot is not None else sorted(jobs):
            for line in hub.logs(jobs[name], follow=follow, tail=lines_each):
                print(f"{'' if slot else name + ': '}{one_line(line, LOG_LINE_MAX)}", flush=True)
    except KeyboardInterrupt:
        return


@app.command("scale")
def scale(
    run: RunArgument,
    learners: Annotated[int | None, typer.Option(min=0)] = None,
    samplers: Annotated[int | None, typer.Option(min=0)] = None,
    verifiers: Annotated[int | None, typer.Option(min=0)] = None,
    namespace: NamespaceOption = None,
    dry_run: DryRun = False,
) -> None:
    """Have so many jobs of a kind from now on: start what is missing, cancel the highest numbers."""
    if learners is samplers is verifiers is None:
        raise OperatorError("scale wants --learners, --samplers or --verifiers")
    asyncio.run(_scale(run, JobOptions(learners, samplers, verifiers), namespace, dry_run))


async def _scale(run: str, options: JobOptions, namespace: str | None, dry_run: bool) -> None:
    from node.hub_jobs import HubJobs
    from node.job_memory import remember

    environment = read_environment()
    hub = await HubJobs.open(environment.hub_endpoint, namespace)
    place = environment.places.jobs(hub.namespace, run)
    swarm, own = remembered(place, run)
    swarm = options.counted(swarm)
    own = own.for_slots(swarm)
    jobs, price = await _planned(environment, hub, swarm, own, dry_run=dry_run, as_json=False)
    if dry_run:
        return
    remember(place, swarm, own)
    await jobs.trim()
    await jobs.start()
    print(summary(swarm, price))


@app.command("down")
def down(run: RunArgument, namespace: NamespaceOption = None) -> None:
    """Cancel every job of a run that still lives. Nothing is lost: ``up`` goes on from the store."""
    asyncio.run(_down(run, namespace))


async def _down(run: str, namespace: str | None) -> None:
    from node.hub_jobs import HubJobs
    from node.job_swarm import cancel_all

    hub = await HubJobs.open(read_environment().hub_endpoint, namespace)
    count = await cancel_all(hub, await hub.jobs_of(run), say)
    if count:
        print(f"cancelled {count} jobs of run {run}; the same `jobs up` goes on from the store")
    else:
        print(f"no job of run {run} lives in {hub.namespace}")


@app.command("broker", hidden=True)
def broker(
    file: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port for nats://.")] = PORT,
    websocket: Annotated[int | None, typer.Option(min=1, max=65535, help="Port for ws://.")] = WEBSOCKET_PORT,
) -> None:
    """Be the broker of a swarm of jobs: on all interfaces, until the run is finished."""
    from node.job_broker import Listening, serve, start_open_broker
    from node.runs import read_run_file
    from node.runtime import run_until_stopped
    from node.telemetry import set_up_logs

    set_up_logs("info")
    environment = read_environment()
    spec = read_run_file(file)
    started = start_open_broker(environment, Listening(port, websocket), spec.name)
    finished: list[bool] = []

    async def main(stop: asyncio.Event) -> None:
        finished.append(await serve(started, environment, spec, port, stop))

    try:
        code = run_until_stopped(main, grace_s=5.0)
    finally:
        started.stop()
    raise typer.Exit(code if code or finished == [True] else EXIT_STOPPED)
