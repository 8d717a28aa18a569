"""A real Llama of two layers with random weights, and samples for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.runspec import RunSpec
from roles.learner.policy import Sample
from roles.learner.torch_logprobs import PaddedRows, score
from roles.learner.torch_policy import TorchPolicy
from roles.policy.compose import Factors, factors_digest
from tests.build import a_runspec

VOCABULARY = 32
EOS = 2


def save_tiny_llama(directory: Path) -> Path:
    """Hidden 32, 2 layers, 2 heads; wide initial weights, so that its distribution is far from flat."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def a_spec(loss: dict[str, Any] | None = None, **learner: Any) -> RunSpec:
    """A run with a rank-4 rsLoRA adapter and a large learning rate."""
    return a_runspec(
        lora={"rank": 4, "alpha": 8, "rslora": True},
        learner={"learning_rate": 1e-2, **learner},
        loss=loss or {},
    )


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient that a backward pass left."""
    assert tensor.grad is not None
    return tensor.grad


def trained_factors(policy: TorchPolicy, seed: int = 1) -> Factors:
    """Factors whose B is not zero."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.1, a.shape).astype(np.float32) for name, a in policy.genesis(0).items()}


def snapshot(policy: TorchPolicy) -> tuple[str, dict[str, bytes]]:
    """All that a step may change: the digest of the factors and the optimizer's state."""
    return factors_digest(policy.factors()), {
        name: array.tobytes() for name, array in policy.state().result().items()
    }


def a_sample(rng: np.random.Generator, *, length: int, **changes: Any) -> Sample:
    """A random completion of ``length`` tokens; its sampler log-probabilities are made up."""
    fields: dict[str, Any] = {
        "prompt_token_ids": rng.integers(3, VOCABULARY, int(rng.integers(1, 6))).astype(np.int32),
        "token_ids": rng.integers(3, VOCABULARY, length).astype(np.int32),
        "sampler_logprobs": rng.normal(-3, 0.5, length).astype(np.float32),
        "advantage": float(rng.normal()),
        "truncated": False,
        "temperature": 1.0,
    }
    return Sample(**(fields | changes))


def some_samples(count: int = 8, seed: int = 0) -> list[Sample]:
    """Samples of ragged lengths."""
    rng = np.random.default_rng(seed)
    return [a_sample(rng, length=int(rng.integers(1, 9))) for _ in range(count)]


def on_policy(policy: TorchPolicy, sample: Sample) -> Sample:
    """``sample`` as if the policy itself had drawn its tokens."""
    with torch.no_grad():
        rows = PaddedRows.of([sample], torch.device("cpu"))
        logprobs = score(policy._causal, rows).logprobs.numpy()
    fields = {name: getattr(sample, name) for name in Sample.__slots__}
    return Sample(**(fields | {"sampler_logprobs": logprobs, "on_policy": True}))


def draw(policy: TorchPolicy, prompt: list[int], temperature: float, seed: int, length: int = 8) -> Sample:
    """Sample a completion token by token from the model's own logits, as an engine does."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    logprobs: list[float] = []
    while len(logprobs) < length and (not logprobs or ids[-1] != EOS):
        with torch.no_grad():
            logits = policy._causal(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        distribution = torch.log_softmax(logits / temperature, -1)
        token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
        ids.append(token)
        logprobs.append(float(distribution[token]))
    return Sample(
        np.array(prompt, np.int32),
        np.array(ids[len(prompt) :], np.int32),
        np.array(logprobs, np.float32),
        advantage=1.0 if seed % 2 else -1.0,
        truncated=ids[-1] != EOS,
        temperature=temperature,
        on_policy=True,
    )
