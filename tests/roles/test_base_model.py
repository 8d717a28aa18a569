"""The base in 4 or 8 bits: learner and samplers round it alike, and its rounded self is trained over."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import OperatorError
from protocol.messages import SamplingParams
from protocol.runspec import RunSpec
from roles.base_model import load_base
from roles.learner.policy import Sample
from roles.learner.torch_adapter import causal_model, open_adapter
from roles.learner.torch_policy import TorchPolicy
from roles.sampler.engine import SampleRequest
from roles.sampler.transformers_engine import TransformersEngine
from tests.roles.learner.tiny_llama import (
    EOS,
    a_spec,
    gradient_of,
    save_tiny_llama,
    snapshot,
    some_samples,
    trained_factors,
)

CPU = torch.device("cpu")
QUANTIZED = find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not QUANTIZED, reason="needs bitsandbytes")
tolerates_its_warnings = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.set_num_threads(1)
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def spec_of(bits: int | None) -> RunSpec:
    spec = a_spec()
    return spec.model_copy(update={"model": spec.model.model_copy(update={"bits": bits})})


def opened(model_dir: Any, bits: int | None) -> TorchPolicy:
    policy = TorchPolicy.open(model_dir, spec_of(bits))
    policy.load(trained_factors(policy))
    return policy


@pytest.mark.skipif(QUANTIZED, reason="bitsandbytes is installed")
@pytest.mark.parametrize("bits", [4, 8])
def test_without_bitsandbytes_the_line_says_what_to_install(model_dir, bits):
    with pytest.raises(OperatorError, match=rf"model\.bits = {bits} needs bitsandbytes: pip install"):
        load_base(model_dir, CPU, dtype="float32", bits=bits)


def test_a_directory_without_a_model_is_an_operator_error(tmp_path):
    with pytest.raises(OperatorError, match="not a causal language model"):
        load_base(tmp_path, CPU, dtype="float32")


@needs_bitsandbytes
@tolerates_its_warnings
@pytest.mark.parametrize(("bits", "tolerance"), [(4, 1e-5), (8, 0.5)])
async def test_the_ratio_of_a_fresh_group_over_a_quantized_base(model_dir, bits, tolerance):
    """1 with 4 bits. With 8 the activations are rounded, too, by what else is in the batch."""
    policy = opened(model_dir, bits)
    engine = TransformersEngine.open(
        model_dir,
        spec_of(bits).lora,
        [EOS],
        device="cpu",
        dtype="float32",
        bits=bits,
        rows_max=8,
        groups_per_batch=1,
        threads=1,
    )
    await engine.load_policy("v1", policy.factors(), newest=True)
    prompt = np.array([3, 4, 5], np.int32)
    params = SamplingParams(max_new_tokens=8)
    request = SampleRequest(
        prompt_token_ids=prompt, count=4, params=params, seed=1, deadline_s=600.0, policy="v1"
    )
    sampled = await engine.sample(request)
    await engine.close()
    samples = [
        Sample(
            prompt,
            rollout.token_ids,
            rollout.sampler_logprobs,
            advantage=1.0 if rollout.index % 2 else -1.0,
            truncated=False,
            temperature=1.0,
            on_policy=True,
        )
        for rollout in sampled.rollouts
    ]
    assert policy.step(samples, 0).metrics["ratio_max_dev_on_policy"] < tolerance


@needs_bitsandbytes
@tolerates_its_warnings
@pytest.mark.parametrize("bits", [4, 8])
def test_factors_over_a_quantized_base_are_fp32_and_learn(model_dir, bits):
    policy = opened(model_dir, bits)
    before = snapshot(policy)
    assert policy.step(some_samples(), 0).updated
    assert snapshot(policy) != before
    assert {tensor.dtype for tensor in policy.factors().values()} == {np.dtype(np.float32)}


@needs_bitsandbytes
@tolerates_its_warnings
@pytest.mark.parametrize(("bits", "share"), [(4, 0.15), (8, 0.26)])
def test_linear_layers_in_few_bits_are_that_much_smaller(model_dir, bits, share):
    def size(held: int | None) -> int:
        model = causal_model(open_adapter(model_dir, spec_of(held).model, a_spec().lora, CPU))
        layers = [m for name, m in model.named_modules() if name.endswith("base_layer")]
        return sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())

    assert size(bits) < share * size(None)


@needs_bitsandbytes
@tolerates_its_warnings
def test_the_gradient_over_4_bits_is_that_over_the_same_weights_in_fp32(model_dir):
    """Also after a forward pass without gradients, which makes bitsandbytes repack on some CPUs."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    quantized, whole = (opened(model_dir, bits) for bits in (4, None))
    for name, module in quantized._causal.named_modules():
        if isinstance(module, Linear4bit):
            weight = whole._causal.get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            weight.data = dequantize_4bit(module.weight.data, module.weight.quant_state).reshape(weight.shape)
    gradients = []
    for policy in (quantized, whole):
        logits = policy._causal(input_ids=torch.arange(3, 13)[None], use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        gradients.append(torch.cat([gradient_of(p).flatten() for p in policy._factors.values()]))
    assert gradients[0].abs().max() > 1e-3
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)
