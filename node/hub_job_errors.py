"""What the Hub answers when a call about jobs fails, in our words; no secret is ever repeated."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from huggingface_hub import errors
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP client in use
from huggingface_hub.utils._http import parse_ratelimit_headers

from protocol.errors import GrpoError, OperatorError, one_line

PAUSE_MAX_S = 300
"""Longest pause that the Hub may ask for; its windows are of five minutes."""
SERVER_FAULT = 500
TOO_MANY = 429


class HubUnavailable(GrpoError):
    """The Hub failed or did not answer; whatever was asked may have taken effect or not."""


class Answered(OperatorError):
    """The Hub refused; asking again changes nothing."""

    def __init__(self, text: str, status: int) -> None:
        """``status`` is HTTP's."""
        super().__init__(text)
        self.status = status


class RateLimited(GrpoError):
    """The Hub refused for now; nothing happened."""

    def __init__(self, text: str, pause_s: float) -> None:
        """``pause_s`` is how long it wants to be left alone."""
        super().__init__(text)
        self.pause_s = pause_s


@contextmanager
def translated(what: str, hidden: Collection[str]) -> Iterator[None]:
    """Turn what the client raises into Answered, RateLimited, HubUnavailable or OperatorError.

    ``what`` was asked for; every text in ``hidden`` is struck out of what the Hub says.
    """
    try:
        yield
    except errors.LocalTokenNotFoundError as exc:
        raise OperatorError("not logged in to the Hub; run: hf auth login") from exc
    except errors.OfflineModeIsEnabled as exc:
        raise OperatorError("HF_HUB_OFFLINE is set; jobs need the Hub: unset it") from exc
    except errors.HfHubHTTPError as exc:
        raise _answer(exc, what, hidden) from None
    except HTTPError as exc:
        raise HubUnavailable(f"{what}: the Hub cannot be reached ({_struck(str(exc), hidden)})") from None
    except ValueError as exc:
        if isinstance(exc, OperatorError):
            raise
        raise HubUnavailable(f"{what}: the Hub's answer cannot be read") from None


def _answer(exc: errors.HfHubHTTPError, what: str, hidden: Collection[str]) -> GrpoError:
    status = exc.response.status_code
    says = _struck(exc.server_message or "", hidden)
    said = f": {says}" if says else ""
    if status == TOO_MANY:
        return RateLimited(f"{what}: too many requests (429), wait some minutes{said}", _pause(exc))
    if status >= SERVER_FAULT:
        return HubUnavailable(f"{what}: the Hub failed ({status}){said}")
    advice = {
        400: "it cannot be right as it is",
        401: "the token is not valid or has expired; run: hf auth login",
        402: "the account has no credit for jobs; see its billing page",
        403: "this token may not do that; jobs need a token that may write them in that namespace, and an "
        "account that pays for them (--namespace, hf auth login)",
        404: "the Hub knows no such namespace, flavor or job; see: hf jobs hardware, and --namespace",
    }
    return Answered(f"{what}: {advice.get(status, 'refused')} ({status}){said}", status)


def _pause(exc: errors.HfHubHTTPError) -> float:
    headers = exc.response.headers
    limit = parse_ratelimit_headers(headers)
    if limit is not None:
        return min(PAUSE_MAX_S, limit.reset_in_seconds + 1)
    after = headers.get("Retry-After", "")
    return min(PAUSE_MAX_S, float(after)) if after.isdigit() else 10.0


def _struck(text: str, hidden: Collection[str]) -> str:
    """One printable line without secrets."""
    for secret in hidden:
        if secret:
            text = text.replace(secret, "***")
    return one_line(" ".join(text.split()))
