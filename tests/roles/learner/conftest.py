"""The base model that the learner's tests train on."""

from __future__ import annotations

import pytest
import torch

from tests.roles.learner.tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    torch.set_num_threads(1)
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
