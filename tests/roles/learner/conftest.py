"""The base model that the learner's tests train on, and policies on it."""

from __future__ import annotations

import pytest
import torch

from roles.learner.torch_policy import TorchPolicy
from tests.roles.learner.tiny_llama import a_spec, save_tiny_llama, trained_factors


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    torch.set_num_threads(1)
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def open_policy(model_dir):
    def open_with(loss=None, **learner) -> TorchPolicy:
        policy = TorchPolicy.open(model_dir, a_spec(loss, **learner))
        policy.load(trained_factors(policy))
        return policy

    return open_with
