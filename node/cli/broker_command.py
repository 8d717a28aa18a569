"""``grpo-node broker``: a broker on this machine, until it is stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from node.settings import read_environment
from protocol.errors import OperatorError

CHECK_S = 0.5


def broker(
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port. [default: that of last time]")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where its data lies. [default: GRPO_HOME/brokers/local]")
    ] = None,
) -> None:
    """Run a broker on this machine's loopback; Ctrl-C ends it, its data stays.

    It prints how nodes reach it. Its token is a secret: whoever has it can write to every run.
    """
    from node.broker import start_broker
    from node.runtime import run_until_stopped
    from node.telemetry import set_up_logs

    set_up_logs("warning")
    environment = read_environment()
    place = directory or environment.places.broker("local")
    started = start_broker(place, port=port, binary=environment.nats_server)
    if started.joined:
        raise OperatorError(f"a broker already runs on {place}: {started.url} (pid {started.pid})")
    print(f"broker {started.url} (nats-server {started.version}), data in {place}")
    print(f"export GRPO_BROKER={started.url} GRPO_TOKEN={started.token}", flush=True)

    async def main(stop: asyncio.Event) -> None:
        while started.alive and not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), CHECK_S)
            except TimeoutError:
                continue
        if not stop.is_set():
            raise OperatorError(f"nats-server ended by itself; its log lies in {place}")

    try:
        raise typer.Exit(run_until_stopped(main, grace_s=1.0))
    finally:
        started.stop()
