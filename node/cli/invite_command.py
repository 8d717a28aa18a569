"""``grpo-node invite``, ``invitations`` and ``revoke``: who may join through the broker on this machine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.broker_command import DirectoryOption
from node.settings import NAME_RULE, ROLES, read_environment
from protocol.clock import NAME_PATTERN
from protocol.errors import OperatorError

if TYPE_CHECKING:
    from node.broker_accounts import Accounts

UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
HOUSEHOLD_MAX = 64


def invite(
    role: Annotated[
        list[str], typer.Option(help=f"What they may play: {', '.join(ROLES)}. May be repeated.")
    ],
    run: Annotated[str, typer.Option(help="Name of the run; it may be created later.")],
    name: Annotated[
        str | None, typer.Option(help="Name of their node. [default: guest-1, guest-2…]", show_default=False)
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="How long it is good for: 90m, 12h, 7d, 4w. [default: until revoked]")
    ] = None,
    household: Annotated[
        int, typer.Option(min=1, max=HOUSEHOLD_MAX, help="So many nodes behind one broker of theirs.")
    ] = 1,
    url: Annotated[
        str | None, typer.Option(help="URL under which they reach this broker. [default: its --public]")
    ] = None,
    directory: DirectoryOption = None,
) -> None:
    """Print one line with which somebody joins a run: broker, login and rights are in it.

    Whoever has the line can use it: send it like a password. The same name again renews it.
    """
    from node.broker import running_broker
    from node.invitation import Invitation
    from node.rights import CORE

    place, accounts = _accounts(directory)
    roles = _checked(role, run, name)
    running = running_broker(place)
    reached = url or accounts.public_url() or (running.url if running is not None else None)
    if reached is None:
        raise OperatorError(
            "--url: say under which URL they reach this broker, or start it with --public URL"
        )
    expires_at = time.time() + seconds(expires) if expires else None
    first = name or accounts.free_name(run)
    nodes = [first] if household == 1 else [f"{first}-{number}" for number in range(1, household + 1)]
    login, claim = accounts.invite(run, roles, nodes, expires_at)
    invitation = Invitation(
        url=reached, run=run, roles=roles, nodes=tuple(nodes), core=CORE, jwt=login.jwt, seed=login.seed
    )
    _tell(place, accounts, [claim])
    print(f"grpo-node {'broker ' if household > 1 else ''}--join {invitation.word()}")


def invitations(
    directory: DirectoryOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Show who was invited, for what, and until when."""
    _, accounts = _accounts(directory)
    rows = [
        {
            "nodes": guest.nodes,
            "roles": guest.roles,
            "run": guest.run,
            "issued_at": guest.issued_at,
            "expires_at": guest.expires_at,
            "state": guest.state(time.time()),
        }
        for guest in accounts.guests()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row, guest in zip(rows, accounts.guests(), strict=True):
        until = "until revoked" if guest.expires_at is None else f"until {time.ctime(guest.expires_at)}"
        print(f"{row['state']:8} {','.join(guest.roles)} {','.join(guest.nodes)} in {guest.run}, {until}")


def revoke(
    node: Annotated[str, typer.Argument(help="Name of a node that was invited.")],
    directory: DirectoryOption = None,
) -> None:
    """End a node's invitation: its connection is cut at once, and it never logs in again."""
    place, accounts = _accounts(directory)
    heard = _tell(place, accounts, accounts.revoke(node))
    print(f"{node} is out" if heard else f"{node} is out once the broker runs again")


def seconds(text: str) -> int:
    """``7d`` in seconds; raises OperatorError."""
    match = re.fullmatch(r"(\d{1,4})([mhdw])", text)
    if match is None or int(match[1]) == 0:
        raise OperatorError(f"--expires {text}: write 90m, 12h, 7d or 4w")
    return int(match[1]) * UNITS_S[match[2]]


def _accounts(directory: Path | None) -> tuple[Path, Accounts]:
    from node.broker_accounts import Accounts

    place = directory or read_environment().places.broker("local")
    if not Accounts.exist(place):
        raise OperatorError(
            f"{place}: no broker with accounts; start one with: grpo-node broker --listen HOST:PORT (--dir …)"
        )
    return place, Accounts.open(place)


def _checked(roles: list[str], run: str, name: str | None) -> tuple[str, ...]:
    for role in roles:
        if role not in ROLES:
            raise OperatorError(f"no such role: {role!r}; roles are {', '.join(ROLES)}")
    for option, value in (("--run", run), ("--name", name)):
        if value is not None and not NAME_PATTERN.fullmatch(value):
            raise OperatorError(f"{option} {value!r}: {NAME_RULE}")
    return tuple(dict.fromkeys(roles))


def _tell(place: Path, accounts: Accounts, claims: list[str]) -> bool:
    """Let the running broker know; False if none runs here."""
    from node.broker import running_broker
    from node.nats_claims import tell_claims

    running = running_broker(place)
    if running is None:
        return False
    asyncio.run(tell_claims(running.url, accounts.system_login().text(), claims))
    return True
