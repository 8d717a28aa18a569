"""Tells a running nats-server of a changed account, which it obeys at once: new rights, or nobody's."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

import nats
import nats.errors
from nats.aio.client import RawCredentials

from protocol.errors import OperatorError

TELL_S = 5.0


async def tell_claims(url: str, credentials: str, claims: Sequence[str]) -> None:
    """Push account JWTs to the server on this machine. Raises OperatorError if it did not take them.

    The certificate is not checked: the server is found on this machine, its name is not this machine's, and
    claims are no secrets. The login proves itself by a signature over what the server asks.
    """
    try:
        async with asyncio.timeout(TELL_S):
            client = await nats.connect(
                url,
                user_credentials=RawCredentials(credentials),
                tls=_unchecked() if urlsplit(url).scheme == "tls" else None,
                allow_reconnect=False,
                error_cb=_ignore,
            )
            try:
                for claim in claims:
                    answer = await client.request("$SYS.REQ.CLAIMS.UPDATE", claim.encode(), timeout=TELL_S)
                    said = json.loads(answer.data)
                    if "error" in said:
                        raise OperatorError(f"the broker refused a change of accounts: {said['error']}")
            finally:
                await client.close()
    except (nats.errors.Error, OSError, TimeoutError) as exc:
        why = str(exc) or type(exc).__name__
        raise OperatorError(
            f"the broker at {url} runs but did not hear of it ({why}); it will when it is started again"
        ) from exc


def _unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _ignore(_: Exception) -> None:
    """What fails is raised to the caller."""
