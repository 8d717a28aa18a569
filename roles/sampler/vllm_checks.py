"""Whether a vLLM server does for a run: each fault is one line that names the flag to change.

A server that nobody here started tells little about its flags, so most of them are seen by what it does: an
adapter of random numbers is loaded and sampled from, and must change what the base model says.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from protocol.clock import GENESIS
from protocol.errors import EngineError, OperatorError
from protocol.runspec import LoraSpec
from roles.policy.compose import Factors
from roles.policy.peft_export import peft_directory
from roles.sampler.vllm_client import NOT_FOUND, BaseModel, ServerFailed, ServerRefused, VllmClient

log = structlog.get_logger()

SLOTS_MIN = 2
"""``max_loras``: with one, rollouts under a new policy wait until the last one under the old is finished."""

CERTAIN = 1e-6
"""How far the log-probability of a token that top-k 1 permits may lie from what it must be."""

TIES_MAX = 8
"""Tokens that top-k 1 permits together because their logits are equal: bfloat16 has few numbers."""

PROBE_S = 600.0
"""For a first completion, during which kernels may be compiled."""

PROBE_SIZE = 0.05
"""Standard deviation of the probe's factors: it must be seen in bfloat16, too."""

PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs of a server."""

    context_tokens: int
    """Longest prompt and completion together."""
    lora: LoraSpec
    shapes: Factors
    """Names and shapes of the factors of every policy."""
    vocab_size: int
    base_ref: str


async def check_server(client: VllmClient, needs: Needs, directory: Path) -> BaseModel:
    """Check everything. The probe goes through ``directory``, a name that was never used before.

    Raises OperatorError if a person must change something, EngineError if the server fails meanwhile.
    """
    base = await client.base_model()
    where = f"vLLM at {client.url}"
    if base.context_tokens < needs.context_tokens:
        raise OperatorError(
            f"{where}: max_model_len is {base.context_tokens}, the run needs {needs.context_tokens}: "
            f"start it with --max-model-len {needs.context_tokens}"
        )
    await _check_logprobs(client, base.name, where, needs)
    await asyncio.to_thread(_write_probe, directory, needs)
    try:
        await _check_adapters(client, base.name, where, needs, directory)
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return base


def rank_flag(rank: int) -> int:
    """The least value that ``--max-lora-rank`` takes and that has room for ``rank``."""
    return next(size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank)


async def _check_logprobs(client: VllmClient, base: str, where: str, needs: Needs) -> None:
    """The token that top-k 1 permits is certain, unless its log-probability is that of raw logits."""
    for probe in _prompts(needs):
        _, logprobs = await _sampled(client, base, probe, top_k=1)
        if not all(is_greedy(logprob) for logprob in logprobs):
            raise OperatorError(
                f"{where}: its log-probabilities are not those of the distribution that it samples from: "
                "start it with --logprobs-mode processed_logprobs"
            )


def is_greedy(logprob: float) -> bool:
    """Whether a log-probability is one that top-k 1 leaves: 0, or -log n where n tokens are the best."""
    ties = round(math.exp(min(-logprob, math.log(TIES_MAX))))
    return abs(logprob + math.log(ties)) <= CERTAIN


async def _check_adapters(client: VllmClient, base: str, where: str, needs: Needs, directory: Path) -> None:
    name, path, rank = directory.name, str(directory), needs.lora.rank
    try:
        await client.load_adapter(name, path)
    except (ServerRefused, ServerFailed) as exc:
        raise OperatorError(f"{where}: {_why_not_loaded(exc, path, rank)}") from exc
    try:
        if not await _changes_something(client, base, name, needs):
            raise OperatorError(
                f"{where}: an adapter is accepted but changes nothing: this model's LoRA is not served there"
            )
        slots = await client.adapter_slots()
    finally:
        await client.unload_adapter(name)
    if slots is None:
        log.warning("vllm_max_loras_unknown", url=client.url, needed=SLOTS_MIN)
    elif slots < SLOTS_MIN:
        raise OperatorError(
            f"{where}: max_loras is {slots}, so that each new policy waits for all rollouts under the old: "
            f"start it with --max-loras {SLOTS_MIN} or more"
        )


def _why_not_loaded(exc: ServerRefused | ServerFailed, path: str, rank: int) -> str:
    text = str(exc)
    if "max_lora_rank" in text:
        flag = f"--max-lora-rank {rank_flag(rank)}"
        return f"max_lora_rank is less than the run's rank {rank}: start it with {flag}"
    if "No adapter found" in text:
        return f"it does not see {path}: --vllm-adapters must name a directory that it shares with this node"
    if isinstance(exc, ServerRefused) and exc.status == NOT_FOUND:
        return (
            "it takes no adapters at run time: start it with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        )
    if "LoRA is not enabled" in text:
        return "it serves no adapters: start it with --enable-lora"
    return f"it does not load an adapter: {text}"


async def _changes_something(client: VllmClient, base: str, adapter: str, needs: Needs) -> bool:
    """Whether any of a few completions differs under the adapter from the base model's."""
    for probe in _prompts(needs):
        # Equal logits and equal seeds would give equal tokens with equal probabilities.
        pairs = [await _sampled(client, model, probe, temperature=1.0, seed=1) for model in (base, adapter)]
        if pairs[0] != pairs[1]:
            return True
    return False


async def _sampled(
    client: VllmClient, model: str, prompt: list[int], **params: Any
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a short completion."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": PROBE_TOKENS,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **params,
    }
    reply = await client.complete(body, timeout_s=PROBE_S)
    try:
        if reply["model"] != model:
            raise EngineError(f"vLLM at {client.url} answered as {reply['model']}, not as {model}")
        choice = reply["choices"][0]
        return list(choice["token_ids"]), [float(p) for p in choice["logprobs"]["token_logprobs"]]
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        raise OperatorError(
            f"vLLM at {client.url} gives no token ids or log-probabilities: use vLLM 0.30 or later"
        ) from exc


def _prompts(needs: Needs) -> list[list[int]]:
    """A few short prompts that fit every run."""
    length = max(1, min(8, needs.context_tokens - PROBE_TOKENS))
    rng = np.random.default_rng(0)
    return [rng.integers(0, needs.vocab_size, length).tolist() for _ in range(3)]


def _write_probe(directory: Path, needs: Needs) -> None:
    rng = np.random.default_rng(0)
    factors = {
        name: (PROBE_SIZE * rng.standard_normal(shape.shape)).astype(np.float32)
        for name, shape in needs.shapes.items()
    }
    directory.mkdir(parents=True)
    for name, content in peft_directory(factors, needs.lora, needs.base_ref, GENESIS).items():
        (directory / name).write_bytes(content)
