"""The transformers engine against a plain forward pass of PEFT, and its way with threads and batches."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from protocol.errors import EngineError
from protocol.messages import SamplingParams
from protocol.runspec import LoraSpec
from roles.policy.compose import Factors
from roles.sampler.engine import Sampled, SampleRequest
from tests.engine_rigs import LORA, VOCAB, TransformersRig, a_request, a_small_model, some_factors


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return a_small_model(tmp_path_factory.mktemp("model"))


def a_peft_model(model_dir, lora: LoraSpec = LORA, factors: Factors | None = None) -> PeftModel:
    """What a learner holds: PEFT's own wrapping of the same base."""
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        use_rslora=lora.rslora,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), config)
    if factors is not None:
        set_peft_model_state_dict(model, {name: torch.from_numpy(t.copy()) for name, t in factors.items()})
    return model.eval()


@torch.no_grad()
def plain_logits(model: PeftModel, prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
    """Logits [T, V] at the completion's positions, from one unpadded row."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    logits: torch.Tensor = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits


def plain_logprobs(model: PeftModel, request: SampleRequest, completion: np.ndarray) -> np.ndarray:
    logits = plain_logits(model, request.prompt_token_ids, completion) / request.params.temperature
    picked = torch.from_numpy(completion.astype(np.int64))[:, None]
    return torch.log_softmax(logits, -1).gather(-1, picked)[:, 0].numpy()


def largest_difference(model: PeftModel, requests: list[SampleRequest], groups: list[Sampled]) -> float:
    return max(
        float(np.abs(plain_logprobs(model, request, rollout.token_ids) - rollout.sampler_logprobs).max())
        for request, group in zip(requests, groups, strict=True)
        for rollout in group.rollouts
    )


async def sampled_by(rig: TransformersRig, factors: Factors, requests: list[SampleRequest]) -> list[Sampled]:
    await rig.engine.load_policy("v1", factors, newest=True)
    groups = await asyncio.gather(*(rig.engine.sample(request) for request in requests))
    await rig.engine.close()
    return list(groups)


TWO_MODULES = LoraSpec(rank=2, alpha=8, target_modules=("q_proj", "down_proj"))


@pytest.mark.parametrize(
    ("lora", "size", "temperature"),
    [
        pytest.param(LORA, 0.0, 1.0, id="genesis"),
        pytest.param(LORA, 0.1, 1.0, id="all-linear"),
        pytest.param(LORA, 0.1, 0.7, id="colder"),
        pytest.param(LORA, 0.1, 1.3, id="hotter"),
        pytest.param(LoraSpec(rank=4, alpha=8, rslora=True), 0.1, 1.0, id="rslora"),
        pytest.param(TWO_MODULES, 0.2, 1.0, id="two-modules"),
    ],
)
async def test_logprobs_equal_a_plain_forward_pass_of_peft(model_dir, lora, size, temperature):
    rig = TransformersRig(model_dir, lora=lora)
    factors = some_factors(rig.shapes, 1, size)
    params = SamplingParams(max_new_tokens=12, temperature=temperature)
    requests = [
        a_request(prompt_token_ids=[3 + n] * length, params=params) for n, length in enumerate((4, 9, 1))
    ]
    groups = await sampled_by(rig, factors, requests)
    assert largest_difference(a_peft_model(model_dir, lora, factors), requests, groups) < 1e-4


async def test_long_completions_that_outlive_their_neighbours_keep_their_own_history(model_dir):
    """Rows leave and others move into their place; buffers grow; prompts are padded."""
    rig = TransformersRig(model_dir)
    factors = some_factors(rig.shapes, 1)
    requests = [
        a_request(
            prompt_token_ids=[3 + n] * (2 + 3 * n), count=10, params=SamplingParams(max_new_tokens=limit)
        )
        for n, limit in enumerate((80, 5, 70, 20))
    ]
    groups = await sampled_by(rig, factors, requests)
    lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    assert max(lengths) > 64
    assert len(set(lengths)) > 10
    assert largest_difference(a_peft_model(model_dir, LORA, factors), requests, groups) < 1e-4


async def test_truncated_logprobs_are_those_of_what_is_left(model_dir):
    rig = TransformersRig(model_dir)
    factors = some_factors(rig.shapes, 1)
    requests = [
        a_request(params=SamplingParams(max_new_tokens=8, top_p=0.8)),
        a_request(params=SamplingParams(max_new_tokens=8, top_k=3)),
    ]
    by_p, by_k = await sampled_by(rig, factors, requests)
    model = a_peft_model(model_dir, LORA, factors)
    for group, request in ((by_p, requests[0]), (by_k, requests[1])):
        for rollout in group.rollouts:
            full = torch.softmax(plain_logits(model, request.prompt_token_ids, rollout.token_ids), -1).numpy()
            for probabilities, token, logprob in zip(
                full, rollout.token_ids, rollout.sampler_logprobs, strict=True
            ):
                ranked = np.sort(probabilities)[::-1]
                kept = 3 if group is by_k else int(np.searchsorted(ranked.cumsum(), 0.8)) + 1
                assert probabilities[token] >= ranked[kept - 1] - 1e-6
                assert logprob == pytest.approx(np.log(probabilities[token] / ranked[:kept].sum()), abs=1e-4)


async def test_sampled_frequencies_follow_the_distribution(model_dir):
    """Pearson's chi-square over 4096 draws: 39 degrees of freedom, deviation beyond 1 in 10^5 fails."""
    rig = TransformersRig(model_dir, rows_max=512)
    factors = some_factors(rig.shapes, 1)
    one = SamplingParams(max_new_tokens=1)
    groups = await sampled_by(
        rig, factors, [a_request(count=256, params=one, seed=seed) for seed in range(16)]
    )
    tokens = [rollout.token_ids[0] for group in groups for rollout in group.rollouts]
    model = a_peft_model(model_dir, LORA, factors)
    expected = torch.softmax(plain_logits(model, a_request().prompt_token_ids, np.array([0])), -1)[0].numpy()
    expected = expected * len(tokens)
    chi_square = ((np.bincount(tokens, minlength=VOCAB) - expected) ** 2 / expected).sum()
    assert expected.min() > 3
    assert chi_square < 85


def test_the_factors_have_the_names_and_shapes_that_peft_gives_them(model_dir):
    for lora in (LORA, TWO_MODULES):
        rig = TransformersRig(model_dir, lora=lora)
        theirs = {
            n: tuple(t.shape) for n, t in get_peft_model_state_dict(a_peft_model(model_dir, lora)).items()
        }
        assert {name: tensor.shape for name, tensor in rig.shapes.items()} == theirs
        asyncio.run(rig.engine.close())


async def test_an_adapter_changes_what_is_sampled_and_genesis_does_not(model_dir):
    rig = TransformersRig(model_dir)
    for name, size in (("genesis", 0.0), ("trained", 0.1)):
        await rig.engine.load_policy(name, some_factors(rig.shapes, 1, size), newest=False)
    genesis, trained = [await rig.engine.sample(a_request(policy=name)) for name in ("genesis", "trained")]
    await rig.engine.close()
    base = a_peft_model(model_dir)
    assert largest_difference(base, [a_request()], [genesis]) < 1e-4
    assert largest_difference(base, [a_request()], [trained]) > 1e-2


@pytest.mark.parametrize(
    "spoil", [lambda name: name.removeprefix("base_model.model."), lambda _: "q_proj.lora_B"]
)
async def test_an_adapter_for_other_modules_is_refused(model_dir, spoil):
    rig = TransformersRig(model_dir, lora=LoraSpec(rank=4, alpha=8, target_modules=("down_proj",)))
    factors = {spoil(name): tensor for name, tensor in some_factors(rig.shapes).items()}
    with pytest.raises(EngineError, match="missing"):
        await rig.engine.load_policy("v1", factors, newest=True)
    await rig.engine.close()


async def test_alone_in_its_batch_a_request_gives_the_same_bytes_whatever_else_is_queued(model_dir):
    rig = TransformersRig(model_dir, groups_per_batch=1)
    await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
    request = a_request(count=8, params=SamplingParams(max_new_tokens=20))
    alone = await rig.engine.sample(request)
    rig.hold()
    others = [a_request(prompt_token_ids=[4] * n, count=n, seed=n) for n in range(1, 7)]
    crowd = [asyncio.ensure_future(rig.engine.sample(r)) for r in (*others[:3], request, *others[3:])]
    await rig.begun()
    rig.release()
    among_others = (await asyncio.gather(*crowd))[3]
    await rig.engine.close()
    for one, other in zip(alone.rollouts, among_others.rollouts, strict=True):
        assert one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.sampler_logprobs.tobytes() == other.sampler_logprobs.tobytes()


async def test_a_request_larger_than_a_batch_is_sampled_in_pieces_under_one_policy(model_dir):
    pieces, whole = TransformersRig(model_dir, rows_max=3), TransformersRig(model_dir, rows_max=64)
    groups = []
    for rig in (pieces, whole):
        await rig.engine.load_policy("v1", some_factors(rig.shapes, 1), newest=True)
        rig.hold()
        running = asyncio.ensure_future(rig.engine.sample(a_request(count=8)))
        await rig.begun()
        await rig.engine.load_policy("v2", some_factors(rig.shapes, 2), newest=True)
        rig.release()
        groups.append(await running)
        await rig.engine.close()
    assert [group.policy for group in groups] == ["v1", "v1"]
    assert [r.token_ids.tolist() for r in groups[0].rollouts] == [
        r.token_ids.tolist() for r in groups[1].rollouts
    ]


async def test_a_prompt_is_prefilled_once_for_its_whole_group(model_dir, monkeypatch):
    rig = TransformersRig(model_dir)
    seen = []
    prefill = rig.model.prefill

    def watched(prompts, counts, *rest):
        seen.append(counts)
        return prefill(prompts, counts, *rest)

    monkeypatch.setattr(rig.model, "prefill", watched)
    await sampled_by(rig, some_factors(rig.shapes), [a_request(count=8), a_request(count=3)])
    assert seen == [[8, 3]]


async def test_two_engines_on_one_model_agree_bit_for_bit(model_dir):
    """A run with one sampler and a seed repeats itself."""
    groups = []
    for _ in range(2):
        rig = TransformersRig(model_dir, groups_per_batch=1)
        groups.append(await sampled_by(rig, some_factors(rig.shapes, 1), [a_request(count=8)]))
    assert groups[0][0].rollouts == groups[1][0].rollouts
