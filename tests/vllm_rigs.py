"""The vLLM engine on a server, real or stub, under a time that a test stops and that counts tokens.

The server answers as fast as it can; its answers then wait in ``PacedTransport`` until as many seconds of the
rig's own time have passed as they have tokens. That time jumps to the next answer or deadline once every
request that is under way has its answer here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import httpx2
import numpy as np

from node.system_clock import SystemClock
from protocol.runspec import LoraSpec
from roles.policy.compose import Factors
from roles.ring import cancelled
from roles.sampler.vllm_adapters import AdapterFiles, Adapters
from roles.sampler.vllm_checks import Needs, check_server
from roles.sampler.vllm_client import LIMITS, VllmClient
from roles.sampler.vllm_engine import Served, VllmEngine
from roles.sampler.vllm_replicas import Replica, Replicas
from roles.sampler.vllm_server import DEFAULT_PATIENCE, Patience, VllmServer
from tests.engine_rigs import CONTEXT, EOS_IDS, LORA, VOCAB

HOPS = 60
"""Turns of the loop within which an answer that is here reaches whoever waits for it."""

STUB_SHAPES: Factors = {
    "base_model.model.q_proj.lora_A.weight": np.zeros((4, 8)),
    "base_model.model.q_proj.lora_B.weight": np.zeros((8, 4)),
}

IMPATIENT = Patience(start_s=60.0, poll_s=0.2, health_s=5.0, stall_s=0.5)
"""For servers that answer at once when they are well."""

_NONCES = itertools.count(1)


class PacedTransport(httpx2.AsyncBaseTransport):
    """Lets completions through at the rig's time; everything else passes. Also the engine's clock."""

    def __init__(self) -> None:
        self._inner = httpx2.AsyncHTTPTransport(limits=LIMITS)
        self._now = 0.0
        self._flying = 0
        self._answers: list[tuple[float, asyncio.Event]] = []
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self._departed = asyncio.Event()
        self.open, self.begun = asyncio.Event(), asyncio.Event()
        self.open.set()
        self._ticker = asyncio.ensure_future(self._tick())

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path != "/v1/completions":
            return await self._inner.handle_async_request(request)
        started = self._now
        self._flying += 1
        self._departed.set()
        try:
            self.begun.set()
            await self.open.wait()
            response = await self._inner.handle_async_request(request)
            content = await response.aread()
            if response.is_success:
                tokens = json.loads(content)["choices"][0]["token_ids"] or []
                await self._until(started + len(tokens), self._answers)
            return httpx2.Response(response.status_code, content=content)
        finally:
            self._flying -= 1

    async def aclose(self) -> None:
        await cancelled(self._ticker)
        await self._inner.aclose()

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        await self._until(self._now + seconds, self._sleepers)

    def skip(self, seconds: float) -> None:
        """Let time pass although answers are missing."""
        self._now += seconds
        for at, event in self._sleepers:
            if at <= self._now:
                event.set()

    async def _until(self, moment: float, waiting: list[tuple[float, asyncio.Event]]) -> None:
        mine = (moment, asyncio.Event())
        waiting.append(mine)
        try:
            await mine[1].wait()
        finally:
            if mine in waiting:
                waiting.remove(mine)

    async def _tick(self) -> None:
        while True:
            await self._departed.wait()
            for _ in range(HOPS):
                await asyncio.sleep(0)
            if not self._flying:
                self._departed.clear()
            if not self._flying or self._flying > len(self._answers) or not self.open.is_set():
                continue
            # Answers before deadlines: a token that is there in time counts.
            moment, _, event = min(
                [(at, 0, event) for at, event in self._answers]
                + [(at, 1, event) for at, event in self._sleepers],
                key=lambda due: due[:2],
            )
            self._now = max(self._now, moment)
            event.set()
            self._answers = [due for due in self._answers if due[1] is not event]
            self._sleepers = [due for due in self._sleepers if due[1] is not event]


def needs(shapes: Factors, lora: LoraSpec = LORA, context: int = CONTEXT) -> Needs:
    """What the rigs' runs need of a server."""
    return Needs(context_tokens=context, lora=lora, shapes=shapes, vocab_size=VOCAB, base_ref="a-model")


class VllmRig:
    """``VllmEngine`` attached to a server. Make one with ``open``."""

    def __init__(
        self, url: str, shapes: Factors, directory: Path, *, rows_max: int, check: bool, patience: Patience
    ) -> None:
        self.shapes = shapes
        self.time = PacedTransport()
        self.client = VllmClient(url, SystemClock(), transport=self.time)
        self.files = AdapterFiles(directory, LORA, "a-model", f"{next(_NONCES):x}")

        async def admit() -> None:
            if check:
                await check_server(self.client, needs(shapes), self.files.fresh("probe"))

        self.server = VllmServer(self.client, SystemClock(), admit, patience=patience)
        self.replicas = Replicas([Replica(self.client, self.server, Adapters(self.client))], rows_max)
        served = Served("vllm-test", shapes, frozenset(EOS_IDS), VOCAB, CONTEXT)
        self.engine = VllmEngine(served, self.replicas, self.files, self.time)

    @classmethod
    async def open(
        cls,
        url: str,
        shapes: Factors,
        directory: Path,
        *,
        rows_max: int = 8,
        check: bool = False,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> VllmRig:
        """Attach; ``check`` makes it check the server as a node does."""
        rig = cls(url, shapes, directory, rows_max=rows_max, check=check, patience=patience)
        await rig.server.open()
        return rig

    def hold(self) -> None:
        self.time.open.clear()
        self.time.begun.clear()

    async def begun(self) -> None:
        await self.time.begun.wait()

    def release(self) -> None:
        self.time.open.set()


async def until_changed(server: VllmServer, *, lives: bool) -> None:
    """Wait until a server was seen to die or to live."""
    changed = asyncio.Event()
    before = server.on_change

    def on_change() -> None:
        before()
        changed.set()

    server.on_change = on_change
    while (server.life is not None) != lives:
        await changed.wait()
        changed.clear()
    server.on_change = before
