"""The base model with LoRA sites, and the two forward passes of decoding: a prompt, one token for every row.

A model built like Llama is served by layers of our own (``transformers_layers.py``) if these give what its
own forward pass gives; any other by its own code (``transformers_forward.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog
import torch
import transformers
from torch import Tensor

from protocol.errors import OperatorError
from protocol.runspec import LoraSpec
from roles.base_model import load_base
from roles.policy.compose import Factors
from roles.sampler.transformers_cache import LAYER, SharedCache, Step
from roles.sampler.transformers_forward import OwnForward
from roles.sampler.transformers_layers import LlamaLayers, looks_like_llama
from roles.sampler.transformers_lora import Adapter, Serving, Site, factor_shapes, find_targets

log = structlog.get_logger()

ATTENTION_KINDS = {"full_attention", "sliding_attention"}

TRIAL_TOKENS = 24
"""Tokens on which another way to compute is held to the model's own forward pass; two thirds are prompt."""

SAME = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits, relative to the largest logit, that is rounding and no other model."""


class Forward(Protocol):
    """A way to compute the two forward passes."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where adapters come in."""
        ...

    def prefill(self, ids: Tensor, mask: Tensor | None, /) -> tuple[Tensor, list[LAYER]]:
        """Run prompts [C, T] that are padded on the left: the last logits [C, V], each layer's cache."""
        ...

    def decode(self, tokens: Tensor, positions: Tensor, cache: SharedCache, step: Step, /) -> Tensor:
        """One more token for every row: logits [N, V]."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What there is to know of the model without holding it."""

    engine: str
    device: torch.device
    vocab_size: int
    context_tokens: int
    token_bytes: int
    """Keys and values of one token in all layers."""
    lora_scale: float
    shapes: Factors
    """One entry per factor, of the right shape; the numbers mean nothing."""
    sites: tuple[Site, ...]

    def place(self, name: str, factors: Factors) -> Adapter:
        """Copy checked factors to the device."""
        return Adapter(
            name, tuple(site.factors(factors, self.lora_scale, self.device) for site in self.sites)
        )


class ServedModel:
    """A causal language model that serves many adapters at once. Used by one thread."""

    def __init__(self, forward: Forward, serving: Serving, facts: ModelFacts) -> None:
        self.facts = facts
        self._forward, self._serving = forward, serving

    @classmethod
    def load(
        cls,
        model_dir: Path,
        lora: LoraSpec,
        *,
        device: str,
        dtype: str,
        bits: int | None = None,
        own_layers: bool = True,
    ) -> ServedModel:
        """Read a model directory, see ``load_base``. Raises OperatorError if it cannot be served.

        ``own_layers`` False keeps to the model's own forward pass.
        """

        def load() -> Any:
            return load_base(model_dir, torch.device(device), dtype=dtype, bits=bits)

        model = load()
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if unknown := sorted(kinds - ATTENTION_KINDS):
            raise OperatorError(f"{model_dir} has {unknown[0]} layers; use engine vllm for such a model")
        expected = _plain_logits(model, torch.device(device))
        engine = f"transformers-{transformers.__version__}-{device}-{dtype}"
        engine += "" if bits is None else f"-{bits}bit"
        if own_layers and bits is None and looks_like_llama(model):
            served = cls._of(LlamaLayers, model, lora, device, engine)
            if served.agrees_with(expected):
                return served
            log.info("own_layers_disagree", model=str(model_dir))
            model = load()
        served = cls._of(OwnForward, model, lora, device, engine)
        if not served.agrees_with(expected):
            raise OperatorError(f"{model_dir} cannot be decoded row by row; use engine vllm for such a model")
        return served

    @classmethod
    def _of(cls, way: type[Any], model: Any, lora: LoraSpec, device: str, engine: str) -> ServedModel:
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        targets = find_targets(model.requires_grad_(requires_grad=False), lora)
        shapes, names = factor_shapes(targets, lora.rank), tuple(targets)
        del targets  # or weights that are merged below would stay in memory beside the merged ones
        serving = Serving()
        forward = way(model, names, serving)
        facts = ModelFacts(
            engine=engine,
            device=torch.device(device),
            vocab_size=config.vocab_size,
            context_tokens=config.max_position_embeddings,
            token_bytes=2 * config.num_hidden_layers * heads * size * model.dtype.itemsize,
            lora_scale=lora.scale,
            shapes=shapes,
            sites=forward.sites,
        )
        return cls(forward, serving, facts)

    def prefill(
        self, prompts: Sequence[Tensor], counts: Sequence[int], adapter: Adapter, cache: SharedCache
    ) -> Tensor:
        """Run each prompt once under ``adapter`` and give it ``counts[i]`` rows at the end of ``cache``.

        Prompts are 1-D. Returns the next token's logits of every new row [rows, V].
        """
        device = self.facts.device
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros((len(prompts), longest), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = True
        self._serving.serve([adapter])
        padded = mask.to(device) if min(lengths) < longest else None
        logits, layers = self._forward.prefill(ids.to(device), padded)
        cache.join(layers, lengths, counts)
        return logits.repeat_interleave(torch.tensor(counts, device=device), dim=0)

    def decode(self, tokens: Sequence[int], adapters: Sequence[Adapter], cache: SharedCache) -> Tensor:
        """One more token for every row of ``cache``, each under its own adapter. Returns logits [N, V]."""
        device = self.facts.device
        self._serving.serve(adapters)
        tokens_N = torch.tensor(tokens, dtype=torch.int64).to(device)
        positions_N = torch.tensor(cache.positions, dtype=torch.int64).to(device)
        logits = self._forward.decode(tokens_N, positions_N, cache, cache.begin())
        cache.end()
        return logits

    @torch.inference_mode()
    def agrees_with(self, expected: Tensor) -> bool:
        """Whether decoding the trial's tokens without an adapter gives these logits [tokens, V]."""
        facts = self.facts
        ids = _trial_ids(facts.vocab_size, facts.context_tokens)
        prompt = max(1, 2 * len(ids) // 3)
        nothing = Adapter("", (None,) * len(facts.sites))
        cache = SharedCache()
        found = [self.prefill([ids[:prompt]], [1], nothing, cache)]
        found += [self.decode([int(token)], [nothing], cache) for token in ids[prompt:]]
        logits, wanted = torch.cat(found), expected[prompt - 1 :]
        worst = float((logits - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
        return worst <= SAME[logits.dtype]


def _trial_ids(vocab_size: int, context_tokens: int) -> Tensor:
    length = min(TRIAL_TOKENS, context_tokens)
    return torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, length))


@torch.inference_mode()
def _plain_logits(model: Any, device: torch.device) -> Tensor:
    """What the model as it was loaded says of the trial's tokens."""
    config = model.config.get_text_config()
    ids = _trial_ids(config.vocab_size, config.max_position_embeddings).to(device)
    logits: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    return logits
