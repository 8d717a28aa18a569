"""Keys and claims of a broker with accounts: NATS JWTs (version 2) of its operator, accounts and users.

A claim is JSON signed with an Ed25519 nkey, as ``nsc`` writes it; nats-server checks the chain operator ─▶
account ─▶ user at each login, ends a connection when its user's claim expires, and needs no list of users.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import nkeys

UNLIMITED = -1
FOR_EVER = 10 * 365 * 24 * 3600
"""Seconds; how far ahead a revocation reaches, for logins that were issued in the same second."""


class Kind(Enum):
    """What a key is for; its public text begins with O, A or U."""

    OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
    ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
    USER = nkeys.PREFIX_BYTE_USER


class Key:
    """A key pair that signs claims."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._pair = nkeys.from_seed(bytearray(seed.encode()))
        self.public: str = bytes(self._pair.public_key).decode()

    @classmethod
    def generate(cls, kind: Kind) -> Key:
        """A new random key."""
        return cls.of(kind, os.urandom(32))

    @classmethod
    def of(cls, kind: Kind, secret: bytes) -> Key:
        """The key that 32 secret bytes make."""
        return cls(bytes(nkeys.encode_seed(secret, kind.value)).decode())

    def sign(self, subject: str, name: str, claim: Mapping[str, Any], expires_at: float | None = None) -> str:
        """A JWT in which this key says ``claim`` of key ``subject``; ``expires_at`` in Unix seconds."""
        body: dict[str, Any] = {"iss": self.public, "sub": subject, "name": name, "iat": int(time.time())}
        if expires_at is not None:
            body["exp"] = int(expires_at)
        body["nats"] = {"version": 2, **claim}
        body["jti"] = base64.b32encode(hashlib.sha256(_json(body)).digest()).decode().rstrip("=")
        signed = f"{_text(_json({'typ': 'JWT', 'alg': 'ed25519-nkey'}))}.{_text(_json(body))}"
        return f"{signed}.{_text(bytes(self._pair.sign(signed.encode())))}"


@dataclass(frozen=True, slots=True)
class Export:
    """Subjects of an account that other accounts may import; ``many`` if a request has several answers."""

    subject: str
    many: bool = False
    stream: bool = False
    """Messages to listen to, rather than a service to publish to."""

    def claim(self) -> dict[str, Any]:
        """As it stands in an account's claim."""
        if self.stream:
            return {"subject": self.subject, "type": "stream"}
        return {
            "subject": self.subject,
            "type": "service",
            "response_type": "Stream" if self.many else "Singleton",
        }


@dataclass(frozen=True, slots=True)
class Import:
    """One subject of another account; ``local`` is its name here."""

    subject: str
    local: str
    stream: bool = False

    def claim(self, account: str) -> dict[str, Any]:
        """As it stands in an account's claim."""
        kind = "stream" if self.stream else "service"
        claim: dict[str, Any] = {"subject": self.subject, "account": account, "type": kind}
        return claim if self.local == self.subject else claim | {"local_subject": self.local}


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """What one account may use."""

    connections: int = UNLIMITED
    leaf_connections: int = UNLIMITED
    disk_bytes: int = 0
    """Of JetStream; 0 means that the account has no streams at all."""


@dataclass(frozen=True, slots=True)
class AccountClaim:
    """An account: what it offers, what it uses of another, and its limits."""

    name: str
    exports: Sequence[Export] = ()
    imports: Sequence[Import] = ()
    imports_from: str = ""
    limits: AccountLimits = field(default_factory=AccountLimits)
    revoked: bool = False
    """Nobody may log in, whatever was issued."""

    def sign(self, operator: Key, account: str) -> str:
        """The JWT of account key ``account``."""
        limits = {
            "conn": self.limits.connections,
            "leaf": self.limits.leaf_connections,
            "subs": UNLIMITED,
            "data": UNLIMITED,
            "payload": UNLIMITED,
            "imports": UNLIMITED,
            "exports": UNLIMITED,
            "wildcards": True,
        }
        if self.limits.disk_bytes:
            limits |= {"disk_storage": self.limits.disk_bytes, "mem_storage": UNLIMITED}
            limits |= {"streams": UNLIMITED, "consumer": UNLIMITED}
        claim: dict[str, Any] = {
            "type": "account",
            "limits": limits,
            "exports": [export.claim() for export in self.exports],
            "imports": [each.claim(self.imports_from) for each in self.imports],
        }
        if self.revoked:
            claim["revocations"] = {"*": int(time.time()) + FOR_EVER}
        return operator.sign(account, self.name, claim)


def sign_operator(operator: Key, name: str) -> str:
    """The JWT of an operator, by itself."""
    return operator.sign(operator.public, name, {"type": "operator"})


def sign_user(
    account: Key, user: str, name: str, expires_at: float | None = None, subscriptions: int = UNLIMITED
) -> str:
    """The JWT of a login of ``account``. What it may do is what its account may do; nats-server counts
    ``subscriptions`` for each connection."""
    claim = {
        "type": "user",
        "subs": subscriptions,
        "data": UNLIMITED,
        "payload": UNLIMITED,
        "pub": {},
        "sub": {},
    }
    return account.sign(user, name, claim, expires_at)


def credentials_text(jwt: str, seed: str) -> str:
    """The content of a ``.creds`` file, which every NATS client reads."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
