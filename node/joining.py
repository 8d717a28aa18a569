"""From what an operator says, or an invitation, to the broker's door."""

from __future__ import annotations

from node.broker_access import BrokerAccess, bearer
from node.invitation import Invitation
from node.settings import NodeSettings, Way
from protocol.errors import OperatorError


def broker_access(url: str, token: str | None, way: Way, *, core: str | None = None) -> BrokerAccess:
    """How to reach ``url``. Raises OperatorError on what no broker could accept."""
    headers = {} if way.bearer is None else {"Authorization": bearer(way.bearer)}
    if not url.startswith(("ws:", "wss:")):
        headers, way = {}, Way(way.credentials, way.ca)  # what a proxy wants; here is none
    return BrokerAccess(
        url,
        token=None if way.credentials is not None else token,
        credentials=way.credentials,
        headers=headers,
        ca=way.ca,
        bearer_file=way.bearer_file,
        core=core,
    )


def node_access(settings: NodeSettings) -> BrokerAccess:
    """How this node enters; the login of an invitation is kept in the node's home, where a node that runs
    already finds it, too. Blocks. Raises OperatorError."""
    invitation = settings.invitation
    if invitation is None:
        return broker_access(settings.broker, settings.token, settings.way)
    kept = invitation.save(settings.places.node(settings.run, settings.name or invitation.nodes[0]))
    way = Way(kept, settings.way.ca, settings.way.bearer, settings.way.bearer_file)
    return broker_access(settings.broker, invitation.token, way, core=invitation.core)


def invited(
    invitation: Invitation, roles: tuple[str, ...], run: str | None, name: str | None
) -> tuple[tuple[str, ...], str]:
    """Roles and name to play under an invitation. Raises OperatorError on what it does not allow."""
    if run not in (None, invitation.run):
        raise OperatorError(f"--run {run}: the invitation is for run {invitation.run}")
    if name is not None and name not in invitation.nodes:
        raise OperatorError(f"--name {name}: the invitation is for {', '.join(invitation.nodes)}")
    if strange := [role for role in roles if role not in invitation.roles]:
        raise OperatorError(f"--role {strange[0]}: the invitation is for {', '.join(invitation.roles)}")
    return roles or invitation.roles, name or invitation.nodes[0]
