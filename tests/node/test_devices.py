"""Devices: ``auto`` finds one that works, and what is not there is said in one line."""

from __future__ import annotations

import pytest
import torch

from node.devices import choose_device
from protocol.errors import OperatorError


def test_auto_is_a_device_that_computes():
    assert torch.ones(2, device=choose_device("auto")).sum().item() == 2


def test_a_device_that_is_there_is_taken_as_it_is():
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize("wanted", ["", "gpu", "CUDA", "cuda:", "cuda:999", "cpu,cuda", "meta", "xpu"])
def test_a_device_that_is_not_there_is_one_line(wanted: str):
    with pytest.raises(OperatorError, match="not on this machine; use auto, cpu, cuda") as refused:
        choose_device(wanted)
    assert f"--device {wanted}:" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(OperatorError, match="--device cuda: not on this machine"):
        choose_device("cuda")
