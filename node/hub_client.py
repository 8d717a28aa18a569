"""Calls of huggingface_hub, each off the event loop, with a deadline and repetitions of our own.

The stock client sets no deadline, repeats some requests and not others, and may have done what it failed at.
What a fault means is the caller's part: ``Told`` turns it into an error of ours, and those that may pass are
worth another try.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx2
import structlog
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.utils._http import parse_ratelimit_headers

from node.off_loop import OffLoop
from node.patience import Patience
from protocol.errors import GrpoError

T = TypeVar("T")

FAULTS = (OSError, RuntimeError, ValueError, EntryNotFoundError, httpx2.HTTPError)
"""All that huggingface_hub and hf_xet raise over the world's faults. hf_xet uses Python's own classes."""

TRANSFER_SHARE = 2 / 3
"""Of the time that is left, for one try of a transfer. hf_xet gives up silence by itself, but not the answer
to the last request of an upload."""

WAIT_MAX_S = 300.0
"""Longest pause that the Hub may ask for; its windows are of five minutes."""

Told = Callable[[Exception], GrpoError]
"""What a fault means. Called on its call's thread, so it may ask the Hub; on the loop for ``NoAnswer``."""

log = structlog.get_logger("hub")


class NoAnswer(TimeoutError):
    """A call that was given up; it may yet take effect. The text goes on after "the Hub"."""


class HubClient:
    """The stock client with bounds."""

    def __init__(self, api: HfApi, passing: type[GrpoError], call_s: float, off_loop: OffLoop) -> None:
        """Errors of class ``passing`` are worth another try, after their ``wait_s`` if they have one.
        ``call_s`` bounds one call that moves no content."""
        self.api = api
        self._passing = passing
        self._call_s = call_s
        self._off_loop = off_loop

    async def once(self, request: Callable[[HfApi], T], told: Told, limit_s: float | None = None) -> T:
        """One call. Raises what ``told`` makes of its fault, and errors of ours as they are. The client's own
        error is not told: it may repeat what was sent."""
        limit_s = self._call_s if limit_s is None else limit_s

        def translated() -> T:
            try:
                return request(self.api)
            except GrpoError:
                raise
            except FAULTS as exc:
                raise told(exc) from None

        try:
            return await self._off_loop.run(translated, limit_s)
        except TimeoutError:
            raise told(NoAnswer(f"did not answer in {limit_s:.3g} s")) from None

    async def repeat(
        self,
        patience: Patience,
        request: Callable[[HfApi], T],
        told: Told,
        *,
        moves: bool = False,
        settled: Callable[[], Awaitable[T | None]] | None = None,
    ) -> T:
        """The same, again and again while its fault may pass and ``patience`` lasts.

        A call that ``moves`` content has ``TRANSFER_SHARE`` of what is left for each try. ``settled`` finds
        out after a fault whether the call took effect all the same, for calls that must not be doubled.
        """
        while True:
            left_s = patience.left_s
            limit_s = max(left_s * TRANSFER_SHARE, self._call_s) if moves else self._call_s
            try:
                found = await self.once(request, told, min(left_s, limit_s))
            except self._passing as exc:
                fault = exc
            else:
                patience.took_effect()
                return found
            log.warning("hub_call_failed", error=str(fault))
            again = await patience.pause(getattr(fault, "wait_s", 0.0))
            if settled is not None and (done := await settled()) is not None:
                return done
            if not again:
                raise fault


def wait_s(exc: HfHubHTTPError) -> float:
    """For how long the Hub wants to be left alone, in seconds; 0 if it did not say."""
    limit = parse_ratelimit_headers(exc.response.headers)
    if limit is not None:
        return min(WAIT_MAX_S, limit.reset_in_seconds + 1)
    text = exc.response.headers.get("Retry-After", "")
    return min(WAIT_MAX_S, float(text)) if text.isdecimal() else 0.0
