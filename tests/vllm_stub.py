"""A server that speaks vLLM's HTTP as far as the engine uses it, without a model, and breaks when told to.

In a test's own loop: ``async with StubServer(StubModel(…)) as stub``. As a process of its own, with the
flags of the real one, so that it can be started by ``--vllm-command`` and killed:

    python -m tests.vllm_stub --model DIR --port 8000 --max-lora-rank 16 …

Faithful where it matters: tokens follow from adapter bytes, prompt and seed alone; a prefix cache goes by the
adapter's *name*; status codes and messages are those of vLLM 0.32; with ``max_loras`` 1 a new adapter waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from aiohttp import web

from protocol.messages import SamplingParams
from roles.policy.compose import factors_digest
from roles.policy.peft_export import read_factors
from roles.sampler.fake_engine import Logits, truncated_logprobs

BASE = "grpo-base"


@dataclass
class StubModel:
    """The flags of a server, as vLLM calls them."""

    vocab_size: int = 40
    max_model_len: int = 96
    max_loras: int = 4
    max_lora_rank: int = 16
    logprobs_mode: str = "processed_logprobs"
    enable_lora: bool = True
    runtime_updating: bool = True
    lora_is_served: bool = True
    """False: adapters are accepted and change nothing."""


@dataclass
class Faults:
    """What goes wrong."""

    statuses: dict[str, list[int]] = field(default_factory=dict)
    """Statuses that a path answers with, before it works again."""
    answers_as: str | None = None
    """Another model's name in every reply."""
    spoiled: dict[str, Any] = field(default_factory=dict)
    """Fields of every choice that are replaced."""
    stalls: bool = False
    """Completions never come."""
    sick: bool = False
    """``/health`` answers 503."""


class Refusal(web.HTTPException):
    """An error as vLLM writes it."""

    def __init__(self, status: int, message: str) -> None:
        self.status_code = status
        super().__init__(text=json.dumps({"error": {"message": message, "code": status}}))


class StubServer:
    """The server. ``calls`` counts requests by path; ``aborted`` those whose client went away."""

    def __init__(self, model: StubModel, *, seconds_per_token: float = 0.0) -> None:
        self.model = model
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.aborted = 0
        self.blind = False
        """Whether it sees no directory of its clients."""
        self.url = ""
        self.loaded: dict[str, str] = {}
        """Digest of the weights by adapter name."""
        self.running: Counter[str] = Counter()
        self.arrived = asyncio.Condition()
        self._seconds_per_token = seconds_per_token
        self._used_adapter = False
        self._prefix_cache: dict[tuple[str, bytes], Logits] = {}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen; 0 is any port."""
        app = web.Application(middlewares=[self._with_faults])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        if self.model.runtime_updating:
            app.router.add_post("/v1/load_lora_adapter", self._load)
            app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Break all connections and listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def start_again(self) -> None:
        """As after a crash: the same address, and no adapter."""
        await self.stop()
        self.loaded.clear()
        self._prefix_cache.clear()
        await self.start(int(self.url.rpartition(":")[2]))

    async def until_running(self, count: int) -> None:
        """Wait until exactly so many completions run."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: sum(self.running.values()) == count)

    @web.middleware
    async def _with_faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls[request.path] += 1
        if statuses := self.faults.statuses.get(request.path):
            raise Refusal(statuses.pop(0), "as the test wants it")
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.faults.sick else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": "0.32.0-stub"})

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": BASE, "parent": None, "max_model_len": self.model.max_model_len}
        return _json({"data": [base, *({"id": name, "parent": BASE} for name in self.loaded)]})

    async def _metrics(self, _: web.Request) -> web.Response:
        gauge = f'vllm:lora_requests_info{{max_lora="{self.model.max_loras}",waiting_lora_adapters=""}} 1.0\n'
        return web.Response(text="# TYPE vllm:lora_requests_info gauge\n" + gauge * self._used_adapter)

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, directory = body["lora_name"], Path(body["lora_path"])
        if name in self.loaded:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded. If you want to load it …")
        if not self.model.enable_lora:
            raise Refusal(500, "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to …")
        if self.blind or not (directory / "adapter_config.json").is_file():
            raise Refusal(404, f"Loading lora {name} failed: No adapter found for {directory}")
        config = json.loads((directory / "adapter_config.json").read_text())
        if config["r"] > self.model.max_lora_rank:
            most = self.model.max_lora_rank
            raise Refusal(500, f"LoRA rank {config['r']} is greater than max_lora_rank {most}.")
        self.loaded[name] = factors_digest(read_factors(directory / "adapter_model.safetensors"))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.loaded:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
        del self.loaded[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, prompt = body["model"], np.array(body["prompt"], np.int32)
        if name != BASE and name not in self.loaded:
            raise Refusal(404, f"The model `{name}` does not exist.")
        if len(prompt) + body["max_tokens"] > self.model.max_model_len:
            raise Refusal(400, "max_tokens cannot be greater than max_model_len")
        if (prompt >= self.model.vocab_size).any():
            raise Refusal(400, "Token id is out of vocabulary")
        logits = self._logits(name, prompt)
        async with self.arrived:
            await self.arrived.wait_for(lambda: self._has_slot(name))
            self.running[name] += 1
            self.arrived.notify_all()
        try:
            choice = self._choice(logits, body)
            if self.faults.stalls:
                await asyncio.Event().wait()
            await asyncio.sleep(self._seconds_per_token * len(choice["token_ids"]))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            await asyncio.shield(self._leave(name))
        self._used_adapter = self._used_adapter or name != BASE
        return _json({"model": self.faults.answers_as or name, "choices": [choice | self.faults.spoiled]})

    async def _leave(self, name: str) -> None:
        async with self.arrived:
            self.running[name] -= 1
            self.arrived.notify_all()

    def _has_slot(self, name: str) -> bool:
        adapters = {other for other, count in self.running.items() if count and other != BASE}
        return name in adapters or name == BASE or len(adapters) < self.model.max_loras

    def _logits(self, name: str, prompt: np.ndarray[Any, Any]) -> Logits:
        key = (name, prompt.tobytes())
        if key not in self._prefix_cache:
            served = self.model.lora_is_served and name != BASE
            digest = self.loaded[name][:16] if served else "0"
            rng = np.random.default_rng([int(digest, 16), zlib.crc32(key[1])])
            self._prefix_cache[key] = rng.normal(size=self.model.vocab_size)
        return self._prefix_cache[key]

    def _choice(self, logits: Logits, body: dict[str, Any]) -> dict[str, Any]:
        shared = {key: body[key] for key in ("temperature", "top_p", "top_k", "min_p") if key in body}
        params = SamplingParams(max_new_tokens=body["max_tokens"], **shared)
        processed = truncated_logprobs(logits, params)
        raw = truncated_logprobs(logits, SamplingParams(max_new_tokens=1))
        rng = np.random.default_rng(body.get("seed"))
        tokens = rng.choice(len(logits), size=params.max_new_tokens, p=np.exp(processed))
        ends = np.flatnonzero(np.isin(tokens, body.get("stop_token_ids", [])))
        tokens = tokens[: ends[0] + 1] if ends.size else tokens
        told = processed if self.model.logprobs_mode == "processed_logprobs" else raw
        return {
            "token_ids": tokens.tolist(),
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": np.minimum(told[tokens], 0.0).tolist()},
            "finish_reason": "stop" if ends.size else "length",
        }


def _json(body: Any) -> web.Response:
    return web.json_response(body)


async def _serve(arguments: argparse.Namespace) -> None:
    config = json.loads((Path(arguments.model) / "config.json").read_text())
    model = StubModel(
        vocab_size=config["vocab_size"],
        max_model_len=arguments.max_model_len or config["max_position_embeddings"],
        max_loras=arguments.max_loras,
        max_lora_rank=arguments.max_lora_rank,
        logprobs_mode=arguments.logprobs_mode,
        enable_lora=arguments.enable_lora,
        runtime_updating=os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").lower() in {"1", "true"},
    )
    await StubServer(model, seconds_per_token=arguments.seconds_per_token).start(arguments.port)
    await asyncio.Event().wait()


def _main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--seconds-per-token", type=float, default=0.001)
    arguments, _ = parser.parse_known_args()
    if arguments.max_lora_rank > 512:
        raise SystemExit(f"error: argument --max-lora-rank: invalid choice: {arguments.max_lora_rank}")
    asyncio.run(_serve(arguments))


if __name__ == "__main__":
    _main()
