"""A policy as a plain PEFT directory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from protocol.errors import StoreCorrupt
from protocol.runspec import LoraSpec
from roles.learner.torch_policy import TorchPolicy
from roles.policy.compose import Factors, factors_digest, fault
from roles.policy.peft_export import factors_bytes, peft_directory, read_factors, target_modules
from tests.build import a_clock
from tests.roles.learner.tiny_llama import a_spec, save_tiny_llama, trained_factors

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.set_num_threads(1)
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def policy(model_dir):
    policy = TorchPolicy.open(model_dir, a_spec())
    policy.load(trained_factors(policy))
    return policy


def write(directory, factors: Factors, spec: LoraSpec, **options):
    for name, data in peft_directory(factors, spec, "base", a_clock(a=2), **options).items():
        (directory / name).write_bytes(data)
    return directory


def loaded(model_dir, directory):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), directory)


def test_peft_loads_the_directory_and_its_logits_equal_the_learners(model_dir, policy, tmp_path):
    exported = loaded(model_dir, write(tmp_path, policy.factors(), a_spec().lora))
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        logits = exported(input_ids=ids).logits
        torch.testing.assert_close(logits, policy._causal(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
        with exported.disable_adapter():
            assert (logits - exported(input_ids=ids).logits).abs().max() > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"rslora": False},
        {"alpha": 3.5},
        {"target_modules": ("q_proj", "down_proj")},
        {"target_modules": ("layers.1.mlp.up_proj",)},
    ],
    ids=str,
)
def test_every_shape_of_adapter_is_exported_so_that_logits_agree(model_dir, tmp_path, changes):
    lora = a_spec().lora.model_copy(update=changes)
    policy = TorchPolicy.open(model_dir, a_spec().model_copy(update={"lora": lora}))
    policy.load(trained_factors(policy))
    exported = loaded(model_dir, write(tmp_path, policy.factors(), lora))
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        logits = exported(input_ids=ids).logits
        torch.testing.assert_close(logits, policy._causal(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
        with exported.disable_adapter():
            assert (logits - exported(input_ids=ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize(("rank", "alpha", "scale"), [(16, 32, 8.0), (64, 16, 2.0), (4, 8, 4.0)])
def test_the_scale_of_rslora_survives_the_export(rank, alpha, scale):
    spec = LoraSpec(rank=rank, alpha=alpha, rslora=True)
    config = json.loads(
        peft_directory({}, spec, "base", a_clock(), targets=["q_proj"])["adapter_config.json"]
    )
    assert spec.scale == scale
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (rank, alpha, True)
    assert type(config["lora_alpha"]) is int


def test_a_loaded_rslora_adapter_is_applied_at_its_full_strength(model_dir, tmp_path):
    spec = LoraSpec(rank=4, alpha=8, rslora=True, target_modules=("layers.0.self_attn.q_proj",))
    factors = {
        f"{PREFIX}.lora_{x}.weight": np.zeros(s, np.float32) for x, s in (("A", (4, 32)), ("B", (32, 4)))
    }
    for tensor in factors.values():
        tensor[0, 0] = 1
    exported = loaded(model_dir, write(tmp_path, factors, spec))
    layer = exported.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([3.0, 5.0])
    with torch.no_grad():
        delta = layer(x) - layer.base_layer(x)
    assert delta[0, :2].tolist() == pytest.approx([12.0, 0.0], abs=1e-5)


def test_all_linear_resolves_to_the_layers_that_carry_factors(policy):
    names = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert target_modules(policy.factors()) == names
    files = peft_directory(policy.factors(), a_spec().lora, "base", a_clock())
    assert json.loads(files["adapter_config.json"])["target_modules"] == list(names)


def test_the_card_names_the_clock_and_the_base_model():
    card = peft_directory({}, LoraSpec(), "org/model", a_clock(a=2, b=1), targets=["q_proj"])[
        "README.md"
    ].decode()
    assert card.startswith("---\nlibrary_name: peft\nbase_model: org/model\n")
    assert "`a:2,b:1`" in card
    assert "| b | 1 |" in card


def test_a_base_model_that_is_not_on_the_hub_stays_out_of_the_front_matter():
    card = peft_directory({}, LoraSpec(), "builtin:tiny", a_clock(), targets=["q_proj"])["README.md"].decode()
    assert "base_model:" not in card


def test_factors_survive_the_file_bit_for_bit_and_give_equal_bytes(policy, tmp_path):
    factors = policy.factors()
    shuffled = {name: np.asfortranarray(factors[name]) for name in sorted(factors, reverse=True)}
    assert factors_bytes(shuffled) == factors_bytes(factors)
    (tmp_path / "f").write_bytes(factors_bytes(shuffled))
    assert factors_digest(read_factors(tmp_path / "f")) == factors_digest(factors)


@pytest.mark.parametrize("cut", [0, 4, 10, -10])
def test_a_cut_file_is_corrupt(policy, tmp_path, cut):
    (tmp_path / "f").write_bytes(factors_bytes(policy.factors())[:cut])
    with pytest.raises(StoreCorrupt):
        read_factors(tmp_path / "f")


def test_a_file_of_bfloat16_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(StoreCorrupt):
        read_factors(tmp_path / "f")


def test_an_adapter_without_the_peft_prefix_is_a_fault(policy):
    stripped = {name.removeprefix("base_model.model."): tensor for name, tensor in policy.factors().items()}
    assert fault(stripped, policy.factors()) == (
        "28 of 28 tensors are missing, first base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    )


def test_an_adapter_for_other_layers_is_a_fault(policy):
    factors = policy.factors()
    queries, downs = (
        {name: t for name, t in factors.items() if layer in name} for layer in ("q_proj", "down_proj")
    )
    assert "4 of 4 tensors are missing" in str(fault(queries, downs))


def test_every_half_loadable_adapter_is_a_fault(policy):
    genesis = policy.factors()
    last = max(genesis)
    nan = {name: tensor.copy() for name, tensor in genesis.items()}
    nan[last][0, 0] = np.nan
    assert "not finite" in str(fault(nan, genesis))
    assert "1 of 28 tensors are missing" in str(
        fault({n: t for n, t in genesis.items() if n != last}, genesis)
    )
    assert "has shape" in str(fault(genesis | {last: genesis[last][:-1]}, genesis))
    assert "unknown tensors" in str(fault(genesis | {"more": genesis[last]}, genesis))
    assert "float64" in str(fault(genesis | {last: genesis[last].astype(np.float64)}, genesis))
    assert fault(genesis, genesis) is None
