"""``grpo-node broker``: a broker on this machine, until it is stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.settings import ENV_BROKER, ENV_CREDENTIALS, ENV_JOIN, ENV_TOKEN, read_environment
from protocol.errors import OperatorError

if TYPE_CHECKING:
    from node.broker import Broker
    from node.broker_config import BrokerOptions
    from node.invitation import Invitation

CHECK_S = 0.5

DirectoryOption = Annotated[
    Path | None, typer.Option("--dir", help="Where its data lies. [default: GRPO_HOME/brokers/local]")
]


def broker(
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port. [default: that of last time]")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to listen on for other machines, with accounts.")
    ] = None,
    websocket: Annotated[
        str | None, typer.Option(help="HOST:PORT for WebSockets, which pass HTTPS proxies; with accounts.")
    ] = None,
    leaf: Annotated[
        str | None, typer.Option(help="HOST:PORT for brokers of households; with accounts.")
    ] = None,
    tls: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Certificate chain and its key (PEM).", show_default=False),
    ] = None,
    accounts: Annotated[
        bool, typer.Option("--accounts", help="Accounts instead of one token, on loopback, too.")
    ] = False,
    public: Annotated[
        str | None, typer.Option(help="URL under which others reach it, for invitations.")
    ] = None,
    join: Annotated[
        str | None, typer.Option(help="Be the broker of a household: pass everything on by this invitation.")
    ] = None,
    directory: DirectoryOption = None,
) -> None:
    """Run a broker on this machine; Ctrl-C ends it, its data stays.

    By itself it listens on loopback, with one token that may do everything: for your own machines. Whatever
    opens it to others gives it accounts: nobody enters whom you have not invited (docs/broker.md).
    """
    from node.broker import start_broker
    from node.invitation import Invitation

    environment = read_environment()
    invitation = Invitation.parse(join) if join else None
    place = directory or environment.places.broker("household" if invitation else "local")
    chosen, options = _options(port, listen, websocket, leaf, tls, accounts=accounts)
    if invitation is not None:
        if options.accounts:
            raise OperatorError("--join is for a broker on loopback; leave --listen and the like out")
        options = _household(invitation, place)
    started = start_broker(place, port=chosen, binary=environment.nats_server, options=options)
    if started.joined:
        raise OperatorError(f"a broker already runs on {place}: {started.url} (pid {started.pid})")
    try:
        _say(started, place, invitation, public)
        raise typer.Exit(_until_stopped(started, place))
    finally:
        started.stop()


def _say(started: Broker, place: Path, invitation: Invitation | None, public: str | None) -> None:
    """How nodes reach it."""
    from node.broker_accounts import Accounts

    print(f"broker {started.url} (nats-server {started.version}), data in {place}", flush=True)
    if invitation is not None:
        _say_household(started, invitation)
    elif Accounts.exist(place):
        url = Accounts.open(place).public_url(public) or started.url
        print(f"export {ENV_BROKER}={url} {ENV_CREDENTIALS}={started.access.credentials}")
        print(f"invite others: grpo-node invite --role sampler --run NAME --dir {place}", flush=True)
    else:
        print(f"export {ENV_BROKER}={started.url} {ENV_TOKEN}={started.token}", flush=True)


def _options(
    port: int | None,
    listen: str | None,
    websocket: str | None,
    leaf: str | None,
    tls: tuple[Path, Path] | None,
    *,
    accounts: bool,
) -> tuple[int | None, BrokerOptions]:
    """The port, and the options; whatever opens a door to others brings accounts."""
    from node.broker_config import BrokerOptions, Doors

    if listen and port is not None:
        raise OperatorError("--listen says the port; leave --port out")
    doors = Doors(
        websocket=address(websocket, "--websocket") if websocket else None,
        leaf=address(leaf, "--leaf") if leaf else None,
        tls=tls,
    )
    host, chosen = address(listen, "--listen") if listen else ("127.0.0.1", port)
    to_others = bool(listen or accounts or doors != Doors())
    return chosen or None, BrokerOptions(host=host, accounts=to_others, doors=doors)


def address(text: str, option: str) -> tuple[str, int]:
    """Host and port; raises OperatorError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise OperatorError(f"{option} {text}: write HOST:PORT, for example 0.0.0.0:4222")
    return host.strip("[]"), int(port)


def _household(invitation: Invitation, place: Path) -> BrokerOptions:
    """A broker without streams that passes everything on to the one that the invitation names."""
    from node.broker_config import BrokerOptions

    credentials = invitation.save(place)
    if credentials is None:
        raise OperatorError("--join: this invitation has no login; use the one that you were given")
    remote = {"urls": [invitation.url], "credentials": str(credentials)}
    return BrokerOptions(jetstream=False, extra={"leafnodes": {"remotes": [remote]}})


def _say_household(started: Broker, invitation: Invitation) -> None:
    print("on this machine, one a GPU:")
    for node in invitation.nodes:
        inside = invitation.model_copy(
            update={
                "url": started.url,
                "token": started.token,
                "nodes": (node,),
                "jwt": None,
                "seed": None,
            }
        )
        print(f"{ENV_JOIN}={inside.word()} grpo-node", flush=True)


def _until_stopped(started: Broker, place: Path) -> int:
    from node.runtime import run_until_stopped

    async def main(stop: asyncio.Event) -> None:
        while started.alive and not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), CHECK_S)
            except TimeoutError:
                continue
        if not stop.is_set():
            raise OperatorError(f"nats-server ended by itself; its log lies in {place}")

    return run_until_stopped(main, grace_s=1.0)
