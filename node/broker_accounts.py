"""The accounts of a broker that others may use: who was invited, for what, until when.

    operator key ──signs──▶ CORE            the owner: has the streams, may do everything in them
                 ──signs──▶ LEARNERS/ann    one account an invitation, by role and node, that imports
                 ──signs──▶ SAMPLERS/bob    from CORE what node/rights.py lists, and has connections and
                 ──signs──▶ VERIFIERS/eve   subscriptions of its own to spend

Everything lies in the broker's directory: the keys, the register of invitations, and one signed claim an
account, which nats-server reads from there. So invitations and revocations outlive any restart.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from node.broker_access import BrokerAccess
from node.nats_jwt import (
    UNLIMITED,
    AccountClaim,
    AccountLimits,
    Key,
    Kind,
    credentials_text,
    sign_operator,
    sign_user,
)
from node.private_file import write_private
from node.rights import CORE, EXPORTS, imports
from protocol.errors import OperatorError

DIRECTORY = "accounts"
KEYS_FILE = "keys.json"
REGISTER_FILE = "invitations.json"
PUBLIC_FILE = "public_url"
CLAIMS = "claims"
OPERATOR_CREDENTIALS = "operator.creds"
"""The owner's login, beside the broker's other files."""

CONNECTIONS_PER_NODE = 4
"""A node has one; while it reconnects, or a household restarts, the server may still count another."""
SUBSCRIPTIONS_PER_NODE = 256
"""A node has about ten; those of a household come through one connection."""


class Guest(BaseModel):
    """One invitation in the register."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: tuple[str, ...]
    roles: tuple[str, ...]
    run: str
    account: str
    """Seed of the account's key: it signs further logins."""
    issued_at: float
    expires_at: float | None
    revoked_at: float | None = None

    @property
    def name(self) -> str:
        """The account's name: ``SAMPLERS/bob``."""
        return f"{'+'.join(f'{role.upper()}S' for role in self.roles)}/{self.nodes[0]}"

    def state(self, now: float) -> str:
        """``good``, ``expired`` or ``revoked``."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "good"

    def claim(self, keys: Keys) -> tuple[str, str]:
        """The account's public key and its JWT."""
        account = Key(self.account).public
        if self.revoked_at is not None:
            return account, AccountClaim(self.name, revoked=True).sign(Key(keys.operator), account)
        wanted = {each for node in self.nodes for each in imports(self.run, self.roles, node)}
        size = len(self.nodes)
        claim = AccountClaim(
            self.name,
            imports=sorted(wanted, key=lambda each: each.subject),
            imports_from=Key(keys.core).public,
            limits=AccountLimits(CONNECTIONS_PER_NODE * size, CONNECTIONS_PER_NODE),
        )
        return account, claim.sign(Key(keys.operator), account)


class Keys(BaseModel):
    """Seeds of everybody who signs, and the operator's own claim, which must never change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator: str
    operator_jwt: str
    system: str
    core: str

    @classmethod
    def generate(cls) -> Keys:
        """New keys for a new broker."""
        operator, system, core = (Key.generate(kind) for kind in (Kind.OPERATOR, Kind.ACCOUNT, Kind.ACCOUNT))
        return cls(
            operator=operator.seed,
            operator_jwt=sign_operator(operator, "grpo"),
            system=system.seed,
            core=core.seed,
        )


@dataclass(frozen=True, slots=True)
class Login:
    """A fresh login: its JWT and the seed that proves it."""

    jwt: str
    seed: str

    @classmethod
    def issue(
        cls, account_seed: str, name: str, expires_at: float | None = None, nodes: int | None = None
    ) -> Login:
        """A login of the account whose key is given; for guests, ``nodes`` is how many share it."""
        user = Key.generate(Kind.USER)
        subscriptions = UNLIMITED if nodes is None else SUBSCRIPTIONS_PER_NODE * nodes
        return cls(sign_user(Key(account_seed), user.public, name, expires_at, subscriptions), user.seed)

    def text(self) -> str:
        """As a credentials file."""
        return credentials_text(self.jwt, self.seed)


_GUESTS = TypeAdapter(tuple[Guest, ...])


class Accounts:
    """The accounts of the broker in ``state_dir``; make or read them with ``open``."""

    def __init__(self, state_dir: Path, keys: Keys) -> None:
        self._directory = state_dir / DIRECTORY
        self._keys = keys

    @staticmethod
    def exist(state_dir: Path) -> bool:
        """Whether the broker in this directory has accounts."""
        return (state_dir / DIRECTORY / KEYS_FILE).is_file()

    @classmethod
    def open(cls, state_dir: Path, keys: Keys | None = None) -> Accounts:
        """Those that are there, or new ones, with ``keys`` if given. Raises OperatorError on a damaged
        directory."""
        directory = state_dir / DIRECTORY
        file = directory / KEYS_FILE
        try:
            (directory / CLAIMS).mkdir(mode=0o700, parents=True, exist_ok=True)
            if not file.is_file():
                keys = keys or Keys.generate()
                write_private(state_dir / OPERATOR_CREDENTIALS, Login.issue(keys.core, "operator").text())
                write_private(file, keys.model_dump_json(indent=1))
            return cls(state_dir, Keys.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError) as exc:
            raise OperatorError(
                f"{file}: the broker's keys cannot be read; restore them from a copy"
            ) from exc

    def settings(self, disk_bytes: int) -> dict[str, Any]:
        """What nats-server must know: the operator, where claims lie, and the two accounts it begins with."""
        operator = Key(self._keys.operator)
        system, core = Key(self._keys.system).public, Key(self._keys.core).public
        owner = AccountClaim(CORE, exports=EXPORTS, limits=AccountLimits(disk_bytes=disk_bytes))
        return {
            "operator": self._keys.operator_jwt,
            "system_account": system,
            "resolver": {"type": "full", "dir": str(self._directory / CLAIMS), "allow_delete": False},
            "resolver_preload": {
                system: AccountClaim("SYSTEM").sign(operator, system),
                core: owner.sign(operator, core),
            },
        }

    def system_login(self) -> Login:
        """A login that lasts minutes, to tell the running server of a changed account."""
        return Login.issue(self._keys.system, "claims", time.time() + 300)

    def public_url(self, said: str | None = None) -> str | None:
        """Where others reach this broker, as its owner said last; ``said`` is kept."""
        file = self._directory / PUBLIC_FILE
        if said is not None:
            write_private(file, BrokerAccess(said).url)
        return file.read_text() if file.is_file() else None

    def free_name(self, run: str) -> str:
        """``guest-1``, ``guest-2``…: the first that nobody was ever given."""
        given = {node for guest in self.guests() if guest.run == run for node in guest.nodes}
        return next(name for number in count(1) if (name := f"guest-{number}") not in given)

    def guests(self) -> tuple[Guest, ...]:
        """The register, oldest first. Raises OperatorError if it is damaged."""
        file = self._directory / REGISTER_FILE
        try:
            return _GUESTS.validate_json(file.read_bytes()) if file.exists() else ()
        except (OSError, ValidationError) as exc:
            raise OperatorError(f"{file}: the register of invitations cannot be read") from exc

    def invite(
        self, run: str, roles: Sequence[str], nodes: Sequence[str], expires_at: float | None
    ) -> tuple[Login, str]:
        """A login for these nodes, and their account's claim, which a running server must be told.

        The same nodes, roles and run again: a further login of the same account; the earlier one stays good
        until it expires. Raises OperatorError if one of the names was given to somebody else.
        """
        with self._locked() as guests:
            fresh = Guest(
                nodes=tuple(nodes),
                roles=tuple(roles),
                run=run,
                account=Key.generate(Kind.ACCOUNT).seed,
                issued_at=time.time(),
                expires_at=expires_at,
            )
            for guest in (guest for guest in guests if guest.revoked_at is None):
                if (guest.nodes, guest.roles, guest.run) == (fresh.nodes, fresh.roles, run):
                    fresh = fresh.model_copy(update={"account": guest.account})
                    guests.remove(guest)
                    break
                if guest.run == run and (taken := set(guest.nodes) & set(nodes)):
                    raise OperatorError(
                        f"{min(taken)} was invited to {run} as {guest.name}; choose another --name, or "
                        f"first: grpo-node revoke {min(taken)}"
                    )
            guests.append(fresh)
        return Login.issue(fresh.account, fresh.nodes[0], expires_at, len(nodes)), self._keep(fresh)

    def admit(self, guests: Iterable[Guest]) -> None:
        """Let in who has a login of an account that was made elsewhere with these keys; in no register."""
        for guest in guests:
            self._keep(guest)

    def revoke(self, node: str) -> list[str]:
        """End every invitation of ``node``; the claims, which a running server must be told.

        Raises OperatorError if there is none. What was revoked before is said again: the server may have
        been unreachable then.
        """
        with self._locked() as guests:
            found = [index for index, guest in enumerate(guests) if node in guest.nodes]
            if not found:
                raise OperatorError(f"nobody named {node} was invited; see: grpo-node invitations")
            for index in found:
                if guests[index].revoked_at is None:
                    guests[index] = guests[index].model_copy(update={"revoked_at": time.time()})
            ended = [guests[index] for index in found]
        return [self._keep(guest) for guest in ended]

    def _keep(self, guest: Guest) -> str:
        """Write the claim to where the server will read it, whether it runs now or not."""
        account, jwt = guest.claim(self._keys)
        write_private(self._directory / CLAIMS / f"{account}.jwt", jwt)
        return jwt

    @contextmanager
    def _locked(self) -> Iterator[list[Guest]]:
        """The register to change; written when the body ends well."""
        with (self._directory / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            guests = list(self.guests())
            yield guests
            text = json.dumps(_GUESTS.dump_python(tuple(guests), mode="json"), indent=1)
            write_private(self._directory / REGISTER_FILE, text)
