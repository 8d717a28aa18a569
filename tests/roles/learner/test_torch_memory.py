"""Recomputed layers change no number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protocol.errors import OperatorError
from roles.learner.torch_memory import recompute_layers
from roles.learner.torch_policy import TorchPolicy
from tests.roles.learner.tiny_llama import snapshot, some_samples


def calls_of(layer: nn.Module) -> list[str]:
    """Grows by one whenever the layer's attention runs."""
    calls: list[str] = []
    attention = layer.self_attn
    assert isinstance(attention, nn.Module)
    attention.register_forward_hook(lambda *_: calls.append("forward"))
    return calls


def test_recomputed_layers_give_the_same_step_bit_for_bit(open_policy):
    plain, recomputed = open_policy(), open_policy(gradient_checkpointing=True)
    before = plain.step(some_samples(), 0).metrics, recomputed.step(some_samples(), 0).metrics
    assert before[0]["loss"] == before[1]["loss"]
    assert snapshot(recomputed) == snapshot(plain)


@pytest.mark.parametrize(("on", "forwards"), [(False, 1), (True, 2)])
def test_a_recomputed_layer_runs_once_more_for_its_gradient_and_only_then(open_policy, on, forwards):
    policy: TorchPolicy = open_policy(gradient_checkpointing=on)
    model = policy._causal
    calls = calls_of(model.model.layers[0])
    ids = torch.arange(3, 9)[None]
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert len(calls) == forwards
    calls.clear()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert len(calls) == 1


def test_a_model_without_layers_to_recompute_is_refused():
    with pytest.raises(OperatorError, match=r"learner\.gradient_checkpointing"):
        recompute_layers(nn.Linear(2, 2))
