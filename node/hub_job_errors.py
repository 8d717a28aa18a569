"""What faults of the Hub mean to whoever runs jobs there, in our words; no secret is ever repeated."""

from __future__ import annotations

from collections.abc import Collection

import httpx2
from huggingface_hub import errors

from node.hub_client import NoAnswer, wait_s
from protocol.errors import GrpoError, OperatorError, one_line

SERVER_FAULT = 500
TOO_MANY = 429


class HubUnavailable(GrpoError):
    """The Hub failed or did not answer; whatever was asked may have taken effect or not."""

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        """``wait_s`` is how long it wants to be left alone."""
        super().__init__(text)
        self.wait_s = wait_s


class Answered(OperatorError):
    """The Hub refused; asking again changes nothing."""

    def __init__(self, text: str, status: int) -> None:
        """``status`` is HTTP's."""
        super().__init__(text)
        self.status = status


def told(exc: Exception, what: str, hidden: Collection[str]) -> GrpoError:
    """``exc`` as Answered, HubUnavailable or OperatorError.

    ``what`` was asked for; every text in ``hidden`` is struck out of what the Hub says.
    """
    if isinstance(exc, errors.LocalTokenNotFoundError):
        return OperatorError("not logged in to the Hub; run: hf auth login")
    if isinstance(exc, errors.OfflineModeIsEnabled):
        return OperatorError("HF_HUB_OFFLINE is set; jobs need the Hub: unset it")
    if isinstance(exc, errors.HfHubHTTPError):
        return _answer(exc, what, hidden)
    if isinstance(exc, NoAnswer):
        return HubUnavailable(f"{what}: the Hub {exc}")
    if isinstance(exc, httpx2.HTTPError | OSError):
        return HubUnavailable(f"{what}: the Hub cannot be reached ({_struck(str(exc), hidden)})")
    return HubUnavailable(f"{what}: the Hub's answer cannot be read")


def _answer(exc: errors.HfHubHTTPError, what: str, hidden: Collection[str]) -> GrpoError:
    status = exc.response.status_code
    says = _struck(exc.server_message or "", hidden)
    said = f": {says}" if says else ""
    if status == TOO_MANY:
        return HubUnavailable(f"{what}: too many requests (429), wait some minutes{said}", wait_s(exc))
    if status >= SERVER_FAULT:
        return HubUnavailable(f"{what}: the Hub failed ({status}){said}", wait_s(exc))
    advice = {
        400: "it cannot be right as it is",
        401: "the token is not valid or has expired; run: hf auth login",
        402: "the account has no credit for jobs; see its billing page",
        403: "this token may not do that; jobs need a token that may write them in that namespace, and an "
        "account that pays for them (--namespace, hf auth login)",
        404: "the Hub knows no such namespace, flavor or job; see: hf jobs hardware, and --namespace",
    }
    return Answered(f"{what}: {advice.get(status, 'refused')} ({status}){said}", status)


def _struck(text: str, hidden: Collection[str]) -> str:
    """One printable line without secrets."""
    for secret in hidden:
        if secret:
            text = text.replace(secret, "***")
    return one_line(" ".join(text.split()))
