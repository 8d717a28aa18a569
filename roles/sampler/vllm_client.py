"""The HTTP side of vLLM: a few requests, each with a deadline, each fault named by what to do about it.

A 4xx is our request's fault and fails at once; a 5xx is the server's and is tried again after a pause with
jitter; no connection, a broken one or no answer in time means that the server is lost.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import structlog

from protocol.errors import EngineError, one_line
from protocol.ports import Clock

log = structlog.get_logger()

TRIES = 4
"""Of a request that is answered with 5xx."""

RETRY_FIRST_S = 0.2
"""Pause before the second try; doubles, and is half to one and a half times as long by chance."""

CONNECT_S = 10.0
ASK_S = 30.0
"""For what needs no model. A busy server's event loop may lag by seconds."""

LOAD_S = 180.0
"""For an adapter, whose load waits for the decoding step in progress, and on its first use for kernels."""

LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
"""Hundreds of completions wait in the server, which queues them better than a connection pool; each has a
connection of its own, for the server closes idle ones, and a request that is sent at that moment is lost."""

BAD_REQUEST = 400
NOT_FOUND = 404
SERVER_FAULT = 500


class ServerLost(EngineError):
    """No connection, a broken one, or no answer in time."""


class ServerRefused(EngineError):
    """The server answered with 4xx."""

    def __init__(self, text: str, status: int) -> None:
        """``status`` is the HTTP status."""
        super().__init__(text)
        self.status = status


class ServerFailed(EngineError):
    """The server answered with 5xx, again and again."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What a server says of the model it serves."""

    name: str
    context_tokens: int


class VllmClient:
    """Speaks to one server. Cancelling a request closes its connection, which makes vLLM abort it."""

    def __init__(self, url: str, clock: Clock, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        """``url`` is the server's root, such as ``http://127.0.0.1:8000``."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._clock = clock
        self._jitter = random.Random(self.url)
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            transport=transport,
            limits=LIMITS,
            trust_env=False,  # a proxy for the internet must not be asked for 127.0.0.1
        )

    async def complete(self, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        """``POST /v1/completions``, however long it takes unless ``timeout_s`` bounds it."""
        return (await self._post("/v1/completions", body, timeout_s)).json()

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load a PEFT directory, which the server reads by the same path. No work if it is loaded already."""
        body = {"lora_name": name, "lora_path": directory}
        try:
            await self._post("/v1/load_lora_adapter", body, LOAD_S)
        except ServerRefused as exc:
            # An earlier try was answered into a broken connection; names are never used for other bytes.
            if not (exc.status == BAD_REQUEST and "already been loaded" in str(exc)):
                raise

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; no error when absent."""
        try:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, ASK_S)
        except ServerRefused as exc:
            if exc.status != NOT_FOUND:
                raise

    async def base_model(self) -> BaseModel:
        """The base model that is served. Raises ServerFailed if the answer is not vLLM's."""
        try:
            cards = (await self._get("/v1/models")).json()["data"]
            base = next(card for card in cards if not card.get("parent"))
            return BaseModel(str(base["id"]), int(base["max_model_len"]))
        except (ValueError, KeyError, TypeError, StopIteration) as exc:
            raise ServerFailed(f"{self.url}/v1/models does not answer as vLLM does") from exc

    async def version(self) -> str:
        """The server's version of vLLM."""
        try:
            return str((await self._get("/version")).json()["version"])
        except (ValueError, KeyError, TypeError) as exc:
            raise ServerFailed(f"{self.url}/version does not answer as vLLM does") from exc

    async def adapter_slots(self) -> int | None:
        """``max_loras``, which only the metrics tell, and only after an adapter was used; else None."""
        try:
            text = (await self._get("/metrics")).text
        except ServerRefused:
            return None
        found = re.search(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', text, re.MULTILINE)
        return int(found[1]) if found else None

    async def check_health(self, timeout_s: float) -> None:
        """Raises EngineError unless the server says that it is well."""
        await self._once("GET", "/health", None, timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _get(self, path: str) -> httpx2.Response:
        return await self._tried("GET", path, None, ASK_S)

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None) -> httpx2.Response:
        return await self._tried("POST", path, body, timeout_s)

    async def _tried(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> httpx2.Response:
        wait_s = RETRY_FIRST_S
        for _ in range(TRIES - 1):
            try:
                return await self._once(method, path, body, timeout_s)
            except ServerFailed as exc:
                log.warning("vllm_request_retried", error=str(exc), wait_s=wait_s)
            await self._clock.sleep(wait_s * (0.5 + self._jitter.random()))
            wait_s *= 2
        return await self._once(method, path, body, timeout_s)

    async def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> httpx2.Response:
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        try:
            response = await self._http.request(method, path, json=body, timeout=timeout)
        except httpx2.HTTPError as exc:
            why = one_line(str(exc)) or type(exc).__name__
            raise ServerLost(f"vLLM at {self.url} is lost: {why} ({path})") from exc
        if response.status_code < BAD_REQUEST:
            return response
        text = f"vLLM at {self.url} answered {response.status_code} to {path}: {_reason(response)}"
        if response.status_code >= SERVER_FAULT:
            raise ServerFailed(text)
        raise ServerRefused(text, response.status_code)


def _reason(response: httpx2.Response) -> str:
    """What the server says is wrong."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = error.get("message") or error.get("detail") or str(error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return one_line(str(text))
