"""Engines set up for tests: a small model, factors of its shape, and time that stops where a test says.

Both rigs count one second a decoding step. ``hold`` stops every generation at its start, ``begun``
waits until one has started (its policy is fixed then), ``release`` lets all go on.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.messages import SamplingParams
from protocol.runspec import LoraSpec
from roles.policy.compose import Factors
from roles.sampler.engine import Engine, SampleRequest
from roles.sampler.fake_engine import FakeEngine
from roles.sampler.transformers_engine import TransformersEngine
from roles.sampler.transformers_model import ServedModel

VOCAB = 40
CONTEXT = 96
EOS_IDS = (2, 7, 8)
LORA = LoraSpec(rank=4, alpha=8)


def a_request(**changes: Any) -> SampleRequest:
    """Four completions of at most six tokens."""
    fields: dict[str, Any] = {
        "prompt_token_ids": [1, 5, 6, 11],
        "count": 4,
        "params": SamplingParams(max_new_tokens=6),
        "seed": 7,
        "policy": None,
        "deadline_s": 1000.0,
    }
    fields |= changes
    fields["prompt_token_ids"] = np.array(fields["prompt_token_ids"], np.int32)
    return SampleRequest(**fields)


def some_factors(shapes: Factors, seed: int = 0, size: float = 0.1) -> Factors:
    """Random factors; ``size`` 0 makes B zero, as in genesis."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape.shape) * (size if ".lora_B." in name else 0.3)).astype(np.float32)
        for name, shape in shapes.items()
    }


def a_small_model(directory: Path, head_dim: int = 8) -> Path:
    """A random Llama with grouped-query attention that says EOS about once in ten tokens.

    vLLM has attention for a ``head_dim`` of 32 and more.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


class Rig(Protocol):
    """An engine and the hand on its clock."""

    @property
    def engine(self) -> Engine: ...

    @property
    def shapes(self) -> Factors: ...

    def hold(self) -> None: ...

    async def begun(self) -> None: ...

    def release(self) -> None: ...


class FakeRig:
    """FakeEngine under a clock that jumps ahead whenever somebody sleeps."""

    def __init__(self) -> None:
        self.shapes = {"a.lora_A.weight": np.zeros((4, 8)), "a.lora_B.weight": np.zeros((8, 4))}
        self._now, self.asleep = 0.0, 0
        self._free, self._asleep = asyncio.Event(), asyncio.Event()
        self._free.set()
        self.engine = FakeEngine(
            self.shapes,
            self,
            eos_ids=EOS_IDS,
            vocab_size=VOCAB,
            context_tokens=CONTEXT,
            groups_max=2,
            seconds_per_token=1.0,
        )

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self.asleep += 1
        await asyncio.sleep(0)
        self._asleep.set()
        await self._free.wait()
        self.asleep -= 1
        self._now += seconds
        await asyncio.sleep(0)

    def hold(self) -> None:
        self._free.clear()
        self._asleep.clear()

    async def begun(self) -> None:
        await self._asleep.wait()

    def release(self) -> None:
        self._free.set()


class Gate:
    """A clock for a worker thread: half a second a look, of which a step takes two, and nobody passes while
    it is shut."""

    def __init__(self) -> None:
        self._ticks = 0
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()

    def monotonic(self) -> float:
        self.reached.set()
        assert self.open.wait(timeout=60), "a test left the gate shut"
        self._ticks += 1
        return self._ticks / 2


class TransformersRig:
    """TransformersEngine on the small model, its steps held by a gate."""

    def __init__(
        self,
        model_dir: Path,
        *,
        rows_max: int = 64,
        groups_per_batch: int | None = None,
        lora: LoraSpec = LORA,
        tokens_max: int | None = None,
        own_layers: bool = True,
        dtype: str = "float32",
    ) -> None:
        self.gate = Gate()
        self.model = ServedModel.load(model_dir, lora, device="cpu", dtype=dtype, own_layers=own_layers)
        self.shapes = self.model.facts.shapes
        self.engine = TransformersEngine(
            self.model,
            EOS_IDS,
            rows_max=rows_max,
            groups_per_batch=groups_per_batch,
            threads=1,
            tokens_max=tokens_max,
            monotonic=self.gate.monotonic,
        )

    def hold(self) -> None:
        self.gate.open.clear()
        self.gate.reached.clear()

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.gate.reached.wait, 60)

    def release(self) -> None:
        self.gate.open.set()
