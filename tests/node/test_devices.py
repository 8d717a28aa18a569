"""Devices: ``auto`` finds one that works, and what is not there is said in one line."""

from __future__ import annotations

import pytest
import torch

from node.devices import choose_device, only_device
from protocol.errors import OperatorError


def test_auto_is_a_device_that_computes():
    assert torch.ones(2, device=choose_device("auto")).sum().item() == 2


def test_a_device_that_is_there_is_taken_as_it_is():
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    "wanted", ["", "gpu", "CUDA", "cuda:", "cuda:999", "cpu,", "cpu,nonsense", "meta", "xpu"]
)
def test_a_device_that_is_not_there_is_one_line(wanted: str):
    with pytest.raises(OperatorError, match="not on this machine; use auto, cpu, cuda") as refused:
        choose_device(wanted)
    assert f"--device {wanted}:" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(OperatorError, match="--device cuda: not on this machine"):
        choose_device("cuda")


def test_a_device_named_twice_is_refused():
    with pytest.raises(OperatorError, match="--device cpu,cpu:0: one device is named twice"):
        choose_device("cpu,cpu:0")


def test_several_devices_are_of_one_kind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # as if every device were there
    assert choose_device("cuda:0,cuda:1") == "cuda:0,cuda:1"
    with pytest.raises(OperatorError, match="several devices must be of one kind"):
        choose_device("cuda:0,cpu")


def test_a_role_that_uses_one_device_says_so():
    assert only_device("cuda:1", "sampler") == "cuda:1"
    with pytest.raises(OperatorError, match="a sampler uses one device; start one sampler for each"):
        only_device("cuda:0,cuda:1", "sampler")
