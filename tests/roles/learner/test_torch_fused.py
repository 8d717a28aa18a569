"""Layers with gradients by hand: the numbers are PEFT's, less is kept, and a strange layer stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from roles.base_model import evaluated
from roles.learner.torch_fused import fuse

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.2,
}
IDS = torch.arange(3, 21).reshape(2, 9)
LAYERS = 2
PER_LAYER = {"linears": 7, "mlp": 1, "norms": 2}


def adapted(kind: str = "llama", dtype: torch.dtype = torch.float32, targets: str | list[str] = "all-linear"):
    """The same adapted model at every call; its B is not zero."""
    torch.manual_seed(0)
    base: Any = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "biased": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        "gelu": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")),
        "gemma": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)),
    }[kind]()
    for name, parameter in base.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter, 1.0, 0.3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base.to(dtype=dtype), config, autocast_adapter_dtype=True)
    evaluated(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0.0, 0.1)
    return model


def step(model: PeftModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of all factors of a function of them."""
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits.float()
    torch.log_softmax(logits, -1)[..., 5].sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def kept_bytes(model: PeftModel) -> int:
    """What a forward pass keeps for its backward pass, weights excepted."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.requires_grad
    return sum(kept.values())


def deviation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kind", ["llama", "biased", "gelu", "gemma"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["gate_proj", "down_proj"]])
def test_logits_and_gradients_are_those_of_peft(kind, targets):
    model = adapted(kind, targets=targets)
    assert fuse(model) > 0
    logits, gradients = step(model)
    expected_logits, expected = step(adapted(kind, targets=targets))
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected.keys()
    assert all(deviation(gradients[name], expected[name]) < 2e-5 for name in expected)


def test_a_base_of_bf16_deviates_no_more_than_peft_does():
    """Both round, at different places; the truth is the same weights in fp32."""
    exact = adapted(dtype=torch.bfloat16).float()
    truth, slopes = step(exact)
    peft, peft_slopes = step(adapted(dtype=torch.bfloat16))
    model = adapted(dtype=torch.bfloat16)
    fuse(model)
    ours, our_slopes = step(model)
    assert deviation(ours, truth) < 1.5 * deviation(peft, truth)
    total, theirs = (
        sum(float((found[n] - slopes[n]).square().sum()) for n in slopes)
        for found in (our_slopes, peft_slopes)
    )
    assert total < 1.5 * theirs
    assert all(gradient.dtype == torch.float32 for gradient in our_slopes.values())


def test_every_layer_of_a_llama_is_replaced_and_less_is_kept():
    model = adapted()
    before = kept_bytes(model)
    assert fuse(model) == LAYERS * sum(PER_LAYER.values()) + 1  # the last norm
    assert kept_bytes(model) < 0.7 * before


def test_without_its_adapter_the_model_is_its_base():
    model = adapted()
    fuse(model)
    with model.disable_adapter():
        off = model(input_ids=IDS).logits
    assert torch.equal(off, adapted().unload()(input_ids=IDS).logits)
    assert not torch.equal(off, model(input_ids=IDS).logits)


def test_merged_factors_count_once():
    model = adapted()
    fuse(model)
    expected = model(input_ids=IDS).logits
    model.merge_adapter()
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_factors_written_in_place_are_the_ones_used():
    model, other = adapted(), adapted()
    fuse(model)
    with torch.no_grad():
        for each in (model, other):
            for name, parameter in each.named_parameters():
                if "lora_" in name:
                    parameter.mul_(-1.5)
    torch.testing.assert_close(step(model)[0], step(other)[0], rtol=1e-5, atol=1e-5)


def test_an_mlp_that_opens_by_something_else_keeps_its_own_forward():
    model = adapted("gelu")
    assert fuse(model) == LAYERS * (PER_LAYER["linears"] + PER_LAYER["norms"]) + 1


def test_a_norm_that_multiplies_by_one_more_keeps_its_own_forward():
    """Gemma's does; given Llama's attribute, it would pass for one of ours by name."""
    norm = Gemma2RMSNorm(8)
    setattr(norm, "variance_epsilon", norm.eps)  # noqa: B010
    nn.init.normal_(norm.weight)
    assert fuse(nn.Sequential(norm)) == 0
    usual = LlamaRMSNorm(8)
    nn.init.normal_(usual.weight)
    assert fuse(nn.Sequential(usual)) == 1


@pytest.mark.parametrize("changed", [{"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_with_more_than_two_factors_keeps_its_own_forward(changed):
    base = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", **changed)
    model = get_peft_model(base, config)
    evaluated(model)
    assert fuse(model) == LAYERS * PER_LAYER["norms"] + 1


def test_trying_a_layer_leaves_its_factors_as_they_were():
    model, untouched = adapted(), adapted()
    fuse(model)
    pairs = zip(model.named_parameters(), untouched.named_parameters(), strict=True)
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def test_a_second_derivative_is_refused_and_not_wrong():
    model = adapted()
    fuse(model)
    factor = next(p for n, p in model.named_parameters() if "lora_B" in n)
    loss = model(input_ids=IDS).logits.square().sum()
    (slope,) = torch.autograd.grad(loss, factor, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
