"""The logins of a swarm of jobs: each slot has an account of its own at the broker (``node/rights.py``).

    machine that launches ── keys ───────▶ the broker's job: the accounts of all slots that there may be
                          └─ invitation ─▶ each peer's job: the login of its own slot, and nothing else

An account's key follows from the broker's keys and the name of its node. So both make the same accounts with
no word between them, and a swarm grows without asking a broker that runs.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

from pydantic import ValidationError

from node.broker_accounts import Guest, Keys, Login
from node.invitation import Invitation
from node.job_plan import GUESTS_MAX, SLOTS_MAX
from node.nats_jwt import Key, Kind
from node.rights import CORE
from node.settings import ENV_BROKER_KEYS, ROLES, Role
from protocol.errors import OperatorError


def read_keys(text: str) -> Keys:
    """A broker's keys. Raises OperatorError, which quotes nothing of them."""
    try:
        return Keys.model_validate_json(text)
    except ValidationError:
        raise OperatorError(f"{ENV_BROKER_KEYS} holds no broker's keys") from None


def slot_name(role: Role, number: int) -> str:
    """The node in a slot."""
    return f"{role}-{number}"


def guest_name(role: Role, number: int) -> str:
    """A node elsewhere."""
    return f"{role}-guest-{number}"


def every_guest(keys: Keys, run: str) -> Iterator[Guest]:
    """Everybody who may ever log in."""
    for role in ROLES:
        for number in range(1, SLOTS_MAX + 1):
            yield _guest(keys, run, role, slot_name(role, number))
        for number in range(1, GUESTS_MAX + 1):
            yield _guest(keys, run, role, guest_name(role, number))


def invitation(keys: Keys, run: str, role: Role, node: str, url: str) -> Invitation:
    """What lets ``node`` play ``role`` and nothing else."""
    login = Login.issue(_guest(keys, run, role, node).account, node, nodes=1)
    return Invitation(
        url=url, run=run, roles=(role,), nodes=(node,), core=CORE, jwt=login.jwt, seed=login.seed
    )


def operator_login(keys: Keys) -> str:
    """A credentials file of the owner's, who may do everything."""
    return Login.issue(keys.core, "operator").text()


def _guest(keys: Keys, run: str, role: Role, node: str) -> Guest:
    secret = hmac.digest(keys.core.encode(), f"account of {node} in {run}".encode(), hashlib.sha256)
    account = Key.of(Kind.ACCOUNT, secret).seed
    return Guest(nodes=(node,), roles=(role,), run=run, account=account, issued_at=0.0, expires_at=None)
