"""One bucket of the Hub: calls that ask and calls that move content, as the store makes them.

hf_xet raises Python's own ``ConnectionError`` for a network fault, a missing bucket and a refused token
alike. So the Hub's API is asked why a transfer failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import httpx2
from huggingface_hub import HfApi, get_session, set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]
from huggingface_hub.utils._http import default_client_factory

from node.hub_client import FAULTS, HubClient, NoAnswer
from node.hub_errors import translated
from node.off_loop import OffLoop
from node.patience import Patience
from protocol.errors import StoreError, StoreUnavailable

T = TypeVar("T")
Transfer = Literal["read", "write"]

_CONFLICT = 409

THREADS_MAX = 8
"""Calls at once, those included that hang although nobody waits for them any more."""


@dataclass(frozen=True, slots=True)
class HubTimes:
    """Seconds."""

    http_s: float = 10.0
    """Silence after which a request to the Hub's API is given up; huggingface_hub then tries again itself."""
    call_s: float = 20.0
    """One call that moves no content."""
    first_pause_s: float = 0.5
    """Before the first retry."""


_TIMES = HubTimes()


@cache
def _bound_requests(silence_s: float) -> None:
    """Give all HTTP clients that huggingface_hub makes in this process, and makes anew after a refused
    connection, a time-out."""

    def client() -> httpx2.Client:
        made = default_client_factory()
        made.timeout = httpx2.Timeout(silence_s)
        return made

    set_client_factory(client)


class HubCalls:
    """One bucket of the Hub."""

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        times: HubTimes = _TIMES,
        off_loop: OffLoop | None = None,
    ) -> None:
        """``bucket`` is ``<namespace>/<name>``. Without ``endpoint`` and ``token`` it is the stock client's
        choice: ``HF_ENDPOINT``, ``HF_TOKEN`` or the stored login, looked up at every call."""
        _bound_requests(times.http_s)
        self.bucket = bucket
        self._api = HfApi(endpoint=endpoint, token=token)
        self._times = times
        threads = off_loop or OffLoop("hub", THREADS_MAX)
        self._client = HubClient(self._api, StoreUnavailable, times.call_s, threads)

    def patience(self, timeout_s: float) -> Patience:
        """The time for one operation, which may be several calls."""
        return Patience(timeout_s, self._times.first_pause_s)

    async def create(self, timeout_s: float) -> bool:
        """Make the bucket, private; False if it is there already. Raises StoreDenied, StoreUnavailable."""

        def make(api: HfApi) -> bool:
            try:
                api.create_bucket(self.bucket, private=True)
            except HfHubHTTPError as exc:
                if exc.response.status_code == _CONFLICT:
                    return False
                raise
            return True

        return await self.ask(self.patience(timeout_s), make)

    async def ask(self, patience: Patience, request: Callable[[HfApi], T]) -> T:
        """A call that moves no content, repeated while its fault may pass and ``patience`` lasts.

        Raises StoreDenied at once; StoreUnavailable; whatever of ours ``request`` raises.
        """
        return await self._client.repeat(patience, request, self._told)

    async def move(self, patience: Patience, request: Callable[[HfApi], T], transfer: Transfer) -> T:
        """A call that moves content; otherwise like ``ask``."""

        def told(exc: Exception) -> StoreError:
            known = isinstance(exc, HfHubHTTPError | NoAnswer)
            return self._told(exc if known else self._reason(transfer) or exc)

        return await self._client.repeat(patience, request, told, moves=True)

    def _told(self, exc: Exception) -> StoreError:
        return translated(exc, self._api, self.bucket)

    def _reason(self, transfer: Transfer) -> Exception | None:
        """Why hf_xet gets no access to the content, or None if it does."""
        url = f"{self._api.endpoint}/api/buckets/{self.bucket}/xet-{transfer}-token"
        try:
            hf_raise_for_status(get_session().get(url, headers=build_hf_headers(token=self._api.token)))
        except FAULTS as exc:
            return exc
        return None
