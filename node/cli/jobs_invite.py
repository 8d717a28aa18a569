"""``grpo-node jobs invite``: one line with which a machine elsewhere joins a swarm of jobs."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from node.cli.jobs_options import NamespaceOption, remembered
from node.cli.jobs_show import address_of
from node.job_plan import GUESTS_MAX
from node.settings import ENV_BEARER, ROLES, read_environment
from protocol.errors import OperatorError


def invite(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    role: Annotated[str, typer.Option(help=f"What it may play: {', '.join(ROLES)}.")],
    number: Annotated[
        int, typer.Option(min=1, max=GUESTS_MAX, help="Which of the role's guests: one a machine.")
    ] = 1,
    namespace: NamespaceOption = None,
) -> None:
    """Print one line with which a machine elsewhere joins, as ``ROLE-guest-NUMBER``.

    Whoever has the line can use it: send it like a password. The Hub's proxy wants a token of its own.
    """
    from node.hub_jobs import HubJobs
    from node.job_logins import guest_name, invitation, read_keys

    if role not in ROLES:
        raise OperatorError(f"no such role: {role!r}; roles are {', '.join(ROLES)}")
    environment = read_environment()

    async def found() -> tuple[HubJobs, str | None]:
        hub = await HubJobs.open(environment.hub_endpoint, namespace)
        return hub, address_of(await hub.jobs_of(run))

    hub, address = asyncio.run(found())
    _, own = remembered(environment.places.jobs(hub.namespace, run), run)
    if address is None:
        raise OperatorError(f"the broker of {run} has no address yet; see: grpo-node jobs status {run}")
    word = invitation(read_keys(own.keys), run, role, guest_name(role, number), address).word()
    print(f"with {ENV_BEARER} set to a token of the Hub that may read {hub.namespace}:", file=sys.stderr)
    print(f"grpo-node --join {word}")
