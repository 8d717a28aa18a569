"""One rollout as a vLLM completion: what is asked, and what the answer must be before anybody trusts it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from protocol.errors import EngineError, one_line
from protocol.messages import FinishReason, Rollout
from roles.sampler.engine import SampleRequest
from roles.streams import rollout_stream


def completion_body(
    request: SampleRequest, index: int, adapter: str, eos_ids: Collection[int]
) -> dict[str, Any]:
    """The request for rollout ``index`` under ``adapter``: token ids in, token ids and log-probabilities out.

    Every sampling parameter is named, since a server may take defaults from the model's generation config.
    """
    params = request.params
    return {
        "model": adapter,
        "prompt": request.prompt_token_ids.tolist(),
        "seed": rollout_seed(request.seed, index),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # EOS is what the run says it is, not what the server read from the model's files.
        "ignore_eos": True,
        "stop_token_ids": sorted(eos_ids),
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
    }


def rollout_seed(seed: int, index: int) -> int:
    """The seed of one rollout, below 2**63: no two of a run share it, whatever the tasks' seeds."""
    return int(rollout_stream(seed, index).integers(1 << 63))


def read_completion(
    reply: Any, request: SampleRequest, index: int, adapter: str, eos_ids: Collection[int]
) -> Rollout:
    """The rollout in a reply. Raises EngineError if anything in it is not what was asked for."""
    try:
        served = reply["model"]
        choice = reply["choices"][0]
        tokens = [int(token) for token in choice["token_ids"]]
        logprobs = [float(logprob) for logprob in choice["logprobs"]["token_logprobs"]]
        finish, prompt = choice["finish_reason"], choice.get("prompt_token_ids")
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        raise EngineError(f"vLLM's reply lacks a field: {one_line(repr(exc))}") from exc
    if served != adapter:
        raise EngineError(f"vLLM answered under {one_line(str(served))}, not under {adapter}")
    if prompt is not None and list(prompt) != request.prompt_token_ids.tolist():
        raise EngineError("vLLM sampled for another prompt than the one it was given")
    if len(logprobs) != len(tokens):
        raise EngineError(f"vLLM gave {len(logprobs)} log-probabilities for {len(tokens)} tokens")
    if not all(math.isfinite(logprob) for logprob in logprobs):
        raise EngineError("vLLM gave a log-probability that is not finite")
    if fault := _ending_fault(tokens, finish, request.params.max_new_tokens, eos_ids):
        raise EngineError(f"vLLM's completion {fault}")
    return Rollout(
        index=index,
        token_ids=np.array(tokens, np.int32),
        # Rounding can lift the log of a certain token above 0.
        sampler_logprobs=np.minimum(np.array(logprobs, np.float32), 0.0),
        finish=FinishReason.STOP if tokens[-1] in eos_ids else FinishReason.LENGTH,
    )


def _ending_fault(tokens: list[int], finish: object, limit: int, eos_ids: Collection[int]) -> str | None:
    """Why a completion did not end as completions of a run do, or None."""
    if not tokens:
        return "has no token"
    if len(tokens) > limit:
        return f"has {len(tokens)} tokens, more than {limit}"
    if any(token in eos_ids for token in tokens[:-1]):
        return "goes on after EOS"
    ended = tokens[-1] in eos_ids
    if ended and finish in {"stop", "length"}:
        return None
    if not ended and finish == "length" and len(tokens) == limit:
        return None
    return f"ended by {one_line(str(finish))!r} after {len(tokens)} of {limit} tokens, without EOS"
