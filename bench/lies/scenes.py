"""Two scenes: the tiny model, which sorts digits, and SmolLM2-135M, which adds them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.lies.attacks import Variants
from bench.lies.models import eight_bit, without_layers
from bench.lies.scene import Scene
from node.models import load_tokenizer, stop_token_ids
from node.tiny_model import DIGITS, EOS, PROMPT_TOKENS, demonstrations, tiny_model
from protocol.runspec import RunSpec

PROMPTS = 4000
SMALLER_LAYERS = 0.8
"""Share of its layers that stands for a smaller SmolLM2."""


def spec_of(ref: str, *, group_size: int, tokens: int, rate: float, seed: int) -> RunSpec:
    """A run of an adapter of rank 4."""
    return RunSpec.model_validate(
        {
            "name": "bench",
            "seed": seed,
            "model": {"ref": ref},
            "lora": {"rank": 4, "alpha": 8},
            "tasks": {"source": "builtin:sort-digits"},
            "rewards": [{"name": "exact"}],
            "sampling": {"group_size": group_size, "max_new_tokens": tokens},
            "learner": {"learning_rate": rate},
            "store": {"url": "file:///nowhere"},
        }
    )


async def tiny_scene(
    models: Path, place: Path, dtype: str = "float32", seed: int = 0
) -> tuple[Scene, Variants]:
    """The tiny model; ``models`` is where it is kept, ``place`` takes the liars' models."""
    directory = tiny_model(models, 0)
    prompts = [row[:PROMPT_TOKENS].astype(np.int32) for row in demonstrations(PROMPTS, 99 + seed)]

    def reward(prompt: Sequence[int], completion: Sequence[int]) -> float:
        return float([*sorted(prompt[1 : 1 + DIGITS]), EOS] == list(completion))

    spec = spec_of("builtin:tiny", group_size=8, tokens=DIGITS + 1, rate=3e-3, seed=seed)
    scene = await Scene.open(spec, directory, (EOS,), prompts, reward, groups_per_update=8)
    variants = Variants(eight_bit(directory, place / "8-bit"), tiny_model(models, 0, steps=200), 3, dtype)
    return scene, variants


async def smollm2_scene(
    directory: Path, place: Path, dtype: str = "float32", seed: int = 0
) -> tuple[Scene, Variants]:
    """SmolLM2-135M-Instruct as ``examples/smollm2.py`` makes it."""
    tokenizer = load_tokenizer(directory)
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} plus {b}? Answer with the number."}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        for a in range(2, 10)
        for b in range(2, 10)
    ]

    def reward(prompt: Sequence[int], completion: Sequence[int]) -> float:
        a, b = re.findall(r"What is (\d) plus (\d)", str(tokenizer.decode(list(prompt))))[0]
        found = re.findall(r"\d+", str(tokenizer.decode(list(completion))))
        return float(bool(found) and int(found[-1][:9]) == int(a) + int(b))

    spec = spec_of(str(directory), group_size=4, tokens=32, rate=4e-5, seed=seed)
    eos_ids = stop_token_ids(directory, tokenizer)
    prompts: list[Sequence[int]] = [np.asarray(ids, np.int32).tolist() for ids in asked]
    scene = await Scene.open(spec, directory, eos_ids, prompts, reward, groups_per_update=4)
    layers = round(30 * SMALLER_LAYERS)
    smaller = without_layers(directory, place / "smaller", layers)
    return scene, Variants(eight_bit(directory, place / "8-bit"), smaller, 20, dtype)
