"""Shapes without weights are those of the model with its weights."""

from __future__ import annotations

import pytest

from protocol.errors import OperatorError
from protocol.runspec import LoraSpec
from roles.policy.adapter_shapes import adapter_shapes
from roles.sampler.transformers_model import ServedModel
from tests.engine_rigs import a_small_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return a_small_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_names_shapes_and_order_are_those_of_the_loaded_model(model_dir, targets):
    lora = LoraSpec(rank=3, target_modules=targets)
    loaded = ServedModel.load(model_dir, lora, device="cpu", dtype="float32").facts.shapes
    found = adapter_shapes(model_dir, lora)
    assert [(name, shape.shape) for name, shape in found.items()] == [
        (name, shape.shape) for name, shape in loaded.items()
    ]


def test_modules_that_the_model_lacks_are_a_persons_mistake(model_dir):
    with pytest.raises(OperatorError, match=r"lora.target_modules do not fit this model"):
        adapter_shapes(model_dir, LoraSpec(target_modules=("q_prj",)))


def test_a_directory_without_a_model_is_a_persons_mistake(tmp_path):
    with pytest.raises(OperatorError, match="is not a causal language model"):
        adapter_shapes(tmp_path, LoraSpec())
