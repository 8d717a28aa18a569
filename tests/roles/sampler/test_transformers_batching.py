"""Continuous batching: who joins and leaves, under which policy, in which memory, on which architectures."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, Qwen2Config, Qwen3Config

from protocol.errors import EngineError
from protocol.messages import SamplingParams
from roles.policy.compose import Factors
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.transformers_cache import SharedCache
from roles.sampler.transformers_forward import OwnForward
from roles.sampler.transformers_layers import LlamaLayers
from tests.engine_rigs import CONTEXT, LORA, VOCAB, TransformersRig, a_request, a_small_model, some_factors

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"sliding_window": 7}
CONFIGS = {
    "qwen2, with biases": (Qwen2Config(**SIZES), LlamaLayers),
    "qwen3, with norms of queries and keys": (Qwen3Config(**SIZES), LlamaLayers),
    "mistral, looking back a window": (MistralConfig(**SIZES, **WINDOW), OwnForward),
    "gemma3, with a window in its first layer and more norms": (
        Gemma3TextConfig(**SIZES, **WINDOW, layer_types=["sliding_attention", "full_attention"]),
        OwnForward,
    ),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return a_small_model(tmp_path_factory.mktemp("model"))


def of_architecture(name: str, directory: Path) -> Path:
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name][0])
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def worst_difference(
    model_dir: Path, factors: Factors, requests: list[SampleRequest], groups: list[Sampled]
) -> float:
    """Of ``sampler_logprobs`` to PEFT's own forward pass of each completion alone."""
    config = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(base, config)
    set_peft_model_state_dict(model, {name: torch.from_numpy(t.copy()) for name, t in factors.items()})
    model.eval()
    worst = 0.0
    for request, group in zip(requests, groups, strict=True):
        for rollout in group.rollouts:
            prompt, ids = request.prompt_token_ids, torch.from_numpy(rollout.token_ids.astype(np.int64))
            whole = torch.cat([torch.from_numpy(prompt.astype(np.int64)), ids])
            logits = model(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0].numpy()
            worst = max(worst, float(np.abs(expected - rollout.sampler_logprobs).max()))
    return worst


def several(limits: tuple[int, ...] = (30, 5, 20, 9), **changes: Any) -> list[SampleRequest]:
    """Prompts and completions of different lengths."""
    return [
        a_request(
            prompt_token_ids=[3 + n] * (2 + 5 * n),
            params=SamplingParams(max_new_tokens=limit),
            seed=n,
            **changes,
        )
        for n, limit in enumerate(limits)
    ]


def watched(rig: TransformersRig, monkeypatch) -> list[tuple[int, set[str]]]:
    """Rows and policies of every step of decoding to come."""
    steps: list[tuple[int, set[str]]] = []
    decode = rig.model.decode

    def watching(tokens, adapters, cache):
        steps.append((len(tokens), {adapter.name for adapter in adapters}))
        return decode(tokens, adapters, cache)

    monkeypatch.setattr(rig.model, "decode", watching)
    return steps


async def together(rig: TransformersRig, requests: list[SampleRequest]) -> list[Sampled]:
    return list(await asyncio.gather(*(rig.engine.sample(request) for request in requests)))


@pytest.mark.parametrize("name", CONFIGS)
async def test_every_architecture_gives_what_its_own_forward_pass_gives(name, tmp_path):
    directory = of_architecture(name, tmp_path)
    rig = TransformersRig(directory)
    assert type(rig.model._forward) is CONFIGS[name][1]
    factors = some_factors(rig.shapes, 1)
    await rig.engine.load_policy("v1", factors, newest=True)
    groups = await together(rig, several())
    await rig.engine.close()
    assert max(len(r.token_ids) for g in groups for r in g.rollouts) > 16
    assert worst_difference(directory, factors, several(), groups) < 1e-4


@pytest.mark.parametrize("own_layers", [True, False])
async def test_groups_of_two_policies_decode_together_each_under_its_own(model_dir, monkeypatch, own_layers):
    rig = TransformersRig(model_dir, own_layers=own_layers)
    steps = watched(rig, monkeypatch)
    versions = {f"v{n}": some_factors(rig.shapes, n) for n in (1, 2)}
    await rig.engine.load_policy("v1", versions["v1"], newest=True)
    rig.hold()
    old = asyncio.ensure_future(together(rig, several()))
    await rig.begun()
    await rig.engine.load_policy("v2", versions["v2"], newest=True)
    new = asyncio.ensure_future(together(rig, several((12, 25))))
    await asyncio.sleep(0)
    rig.release()
    groups = {"v1": await old, "v2": await new}
    await rig.engine.close()
    assert {"v1", "v2"} in [policies for _, policies in steps]
    for name, sampled in groups.items():
        assert {group.policy for group in sampled} == {name}
        requests = several()[:4] if name == "v1" else several((12, 25))
        assert worst_difference(model_dir, versions[name], requests, sampled) < 1e-4


async def test_who_waits_joins_as_soon_as_rows_leave(model_dir, monkeypatch):
    rig = TransformersRig(model_dir, rows_max=8)
    steps = watched(rig, monkeypatch)
    factors = some_factors(rig.shapes, 1)
    await rig.engine.load_policy("v1", factors, newest=True)
    requests = [a_request(seed=n, params=SamplingParams(max_new_tokens=40)) for n in range(8)]
    groups = await together(rig, requests)
    await rig.engine.close()
    assert max(rows for rows, _ in steps) <= 8
    grew = [after for (before, _), (after, _) in itertools.pairwise(steps) if after > before]
    assert len(grew) >= 3, "rows joined others that were decoding"
    assert worst_difference(model_dir, factors, requests, groups) < 1e-4


async def test_the_composition_of_the_batch_changes_no_rollout(model_dir):
    alone: list[Sampled] = []
    crowd: list[Sampled] = []
    for rig, groups in (
        (TransformersRig(model_dir, groups_per_batch=1), alone),
        (TransformersRig(model_dir), crowd),
    ):
        await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
        groups += await together(rig, several())
        await rig.engine.close()
    for one, other in zip(alone, crowd, strict=True):
        assert [r.token_ids.tolist() for r in one.rollouts] == [r.token_ids.tolist() for r in other.rollouts]


async def test_over_budget_tasks_wait_and_all_are_served(model_dir, monkeypatch):
    budget = SharedCache.tokens_held(rows=8, longest_new=40, chunks=2, longest_prompt=4)
    rig = TransformersRig(model_dir, tokens_max=budget)
    steps = watched(rig, monkeypatch)
    await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
    requests = [a_request(seed=n, params=SamplingParams(max_new_tokens=40)) for n in range(6)]
    groups = await together(rig, requests)
    await rig.engine.close()
    assert [len(group.rollouts) for group in groups] == [4] * 6
    assert max(rows for rows, _ in steps) <= 8


async def test_a_group_beyond_the_budget_is_sampled_in_pieces(model_dir, monkeypatch):
    rig = TransformersRig(model_dir, tokens_max=1)
    steps = watched(rig, monkeypatch)
    await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
    sampled = await rig.engine.sample(a_request(count=3))
    await rig.engine.close()
    assert len(sampled.rollouts) == 3
    assert {rows for rows, _ in steps} == {1}


async def test_out_of_memory_shrinks_the_budget_and_tries_again(model_dir, monkeypatch):
    rig, roomy = TransformersRig(model_dir), TransformersRig(model_dir)
    decode = rig.model.decode

    def small_device(tokens, adapters, cache):
        if len(tokens) > 5:
            raise torch.OutOfMemoryError("no memory left")
        return decode(tokens, adapters, cache)

    monkeypatch.setattr(rig.model, "decode", small_device)
    groups = []
    for engine_rig in (rig, roomy):
        await engine_rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
        groups.append(await together(engine_rig, several()))
        await engine_rig.engine.close()
    for tight, free in zip(*groups, strict=True):
        assert [r.token_ids.tolist() for r in tight.rollouts] == [r.token_ids.tolist() for r in free.rollouts]


async def test_rows_that_are_not_finite_fail_their_own_request_only(model_dir, monkeypatch):
    rig = TransformersRig(model_dir)
    await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
    await rig.engine.load_policy("broken", some_factors(rig.shapes, 2, 1e20), newest=False)
    params = SamplingParams(max_new_tokens=20)
    rig.hold()
    broken = asyncio.ensure_future(rig.engine.sample(a_request(policy="broken", params=params)))
    sound = asyncio.ensure_future(rig.engine.sample(a_request(params=params)))
    await rig.begun()
    rig.release()
    with pytest.raises(EngineError, match="not finite"):
        await broken
    assert len((await sound).rollouts) == 4
    await rig.engine.close()


async def test_half_precision_samples_near_what_full_precision_gives(model_dir):
    rig = TransformersRig(model_dir, dtype="bfloat16")
    factors = some_factors(rig.shapes, 1)
    await rig.engine.load_policy("v1", factors, newest=True)
    groups = await together(rig, several())
    await rig.engine.close()
    assert worst_difference(model_dir, factors, several(), groups) < 0.1


async def test_a_group_tells_when_its_first_token_came_and_how_long_the_engine_stood_still(model_dir):
    """A look at the clock when a step begins and one when its tokens are sampled, half a second each."""
    rig = TransformersRig(model_dir)
    await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
    params = SamplingParams(max_new_tokens=4)
    sampled = await rig.engine.sample(a_request(count=64, params=params))
    steps = max(len(rollout.token_ids) for rollout in sampled.rollouts)
    assert steps == 4
    assert sampled.first_token_s == 0.5
    assert sampled.held_s == 0.5 * (steps - 1)
    await rig.engine.close()
