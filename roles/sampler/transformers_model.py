"""The base model with one LoRA slot, and the two forward passes of decoding.

PEFT decides which modules carry LoRA and how their factors are called, so that names agree with the
learner's. Its wrappers are then replaced by ``LoraLinear``: the same sum ``Wx + s·B(Ax)`` with less
overhead a step, and factors that are exchanged by reference, which makes an adapter switch free.
Merging B·A into W was measured and not adopted: it would save up to a tenth of a step, but costs a
second copy of the weights and a pass over all of them a switch, and rounds a bf16 update away.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import DynamicCache

from protocol.errors import OperatorError
from protocol.runspec import LoraSpec
from roles.base_model import evaluated, load_base, with_adapter
from roles.policy.compose import Factors
from roles.sampler.transformers_cache import RowCache

PREFILL_TOKENS_MAX = 8192
"""Prompt tokens of one forward pass; more raises peak memory, fewer makes prefill less efficient."""

ATTENTION_KINDS = {"full_attention", "sliding_attention"}


class LoraLinear(nn.Module):
    """``Wx + s·B(Ax)``; the LoRA part in fp32, as PEFT computes it."""

    def __init__(self, base: nn.Module, inside: int, outside: int) -> None:
        super().__init__()
        self.base = base
        self.inside, self.outside = inside, outside
        self.factors: tuple[Tensor, Tensor] | None = None
        """A transposed [in, r], and s·B transposed [r, out]."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., in], giving [..., out]."""
        result: Tensor = self.base(x)
        assert self.factors is not None, "a policy is activated before the first forward pass"
        a, b = self.factors
        flat = result.reshape(-1, result.shape[-1]).to(a.dtype)
        low = x.reshape(-1, x.shape[-1]).to(a.dtype) @ a
        return torch.addmm(flat, low, b).to(result.dtype).view(result.shape)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A policy's factors on the device, ready to serve: one pair for each LoRA module, in order."""

    name: str
    pairs: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What there is to know of the model without holding it."""

    engine: str
    device: torch.device
    vocab_size: int
    context_tokens: int
    lora_scale: float
    shapes: Factors
    """One entry per factor, of the right shape; the numbers mean nothing."""

    def place(self, name: str, factors: Factors) -> Adapter:
        """Copy checked factors to the device."""

        def served(factor: str, scale: float) -> Tensor:
            host = torch.from_numpy(np.array(factors[factor].T, dtype=np.float32, order="C"))
            return (host * scale).to(self.device)

        names = list(self.shapes)
        pairs = zip(names[::2], names[1::2], strict=True)
        return Adapter(name, tuple((served(a, 1.0), served(b, self.lora_scale)) for a, b in pairs))


class ServedModel:
    """A causal language model that serves one adapter at a time. Used by one thread."""

    def __init__(self, model: Any, lora: LoraSpec, device: torch.device, dtype: str) -> None:
        """Take over ``model``, which is on ``device``. Raises OperatorError if this LoRA does not fit it."""
        self._linears = _insert_lora(model, lora)
        self._model = evaluated(model).requires_grad_(requires_grad=False)
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._active: Adapter | None = None
        config = model.config.get_text_config()
        self.facts = ModelFacts(
            engine=f"transformers-{transformers.__version__}-{device.type}-{dtype}",
            device=device,
            vocab_size=config.vocab_size,
            context_tokens=config.max_position_embeddings,
            lora_scale=lora.scale,
            shapes=_shapes(self._linears, lora.rank),
        )

    @classmethod
    def load(
        cls, model_dir: Path, lora: LoraSpec, *, device: str, dtype: str, bits: int | None = None
    ) -> ServedModel:
        """Read a model directory, see ``load_base``. Raises OperatorError if it cannot be served."""
        model = load_base(model_dir, torch.device(device), dtype=dtype, bits=bits)
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if unknown := sorted(kinds - ATTENTION_KINDS):
            raise OperatorError(f"{model_dir} has {unknown[0]} layers; use engine vllm for such a model")
        return cls(model, lora, torch.device(device), dtype if bits is None else f"{dtype}-{bits}bit")

    def activate(self, adapter: Adapter) -> None:
        """Serve ``adapter`` from the next forward pass on."""
        if adapter is not self._active:
            for linear, pair in zip(self._linears.values(), adapter.pairs, strict=True):
                linear.factors = pair
            self._active = adapter

    def prefill(self, prompts: Sequence[Tensor], repeats: Sequence[int]) -> tuple[Tensor, RowCache]:
        """Run each prompt once and give it ``repeats[i]`` rows.

        Prompts are 1-D and padded on the left to the longest one. Returns the next token's logits
        [rows, V] and the cache of all rows.
        """
        length = max(len(prompt) for prompt in prompts)
        step = max(1, PREFILL_TOKENS_MAX // length)
        cache: RowCache | None = None
        logits, first_row = [], 0
        for start in range(0, len(prompts), step):
            part, counts = prompts[start : start + step], repeats[start : start + step]
            prompt_cache = DynamicCache()
            last = self._forward_prompts(part, length, prompt_cache)
            cache = cache or RowCache(sum(repeats), prompt_cache)
            cache.write_prompt(first_row, prompt_cache, counts)
            first_row += sum(counts)
            logits.append(last.repeat_interleave(torch.tensor(counts, device=last.device), dim=0))
        assert cache is not None, "there is at least one prompt"
        return torch.cat(logits), cache

    def _forward_prompts(self, prompts: Sequence[Tensor], length: int, cache: DynamicCache) -> Tensor:
        ids = torch.zeros((len(prompts), length), dtype=torch.int64)
        mask = torch.zeros((len(prompts), length), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, length - len(prompt) :] = prompt
            mask[row, length - len(prompt) :] = True
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return self._forward(ids, positions, None if bool(mask.all()) else mask, cache)

    def decode(self, tokens_N: Tensor, pads_N: Tensor, cache: RowCache) -> Tensor:
        """One more token for every row; ``pads_N`` counts each row's padding. Returns logits [N, V]."""
        length = cache.get_seq_length()
        mask = None
        if bool(pads_N.any()):
            mask = torch.arange(length + 1) >= pads_N.unsqueeze(1)
        return self._forward(tokens_N.unsqueeze(1), (length - pads_N).unsqueeze(1), mask, cache)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        device = self.facts.device
        out = self._model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=None if mask is None else mask.to(device),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        logits: Tensor = out.logits[:, -1]
        return logits


def _insert_lora(model: Any, lora: LoraSpec) -> dict[str, LoraLinear]:
    """Replace the modules that PEFT would wrap, and return them by their path in the model."""
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT computes with any number
        use_rslora=lora.rslora,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with_adapter(model, config)
    except ValueError as exc:
        raise OperatorError(f"lora.target_modules do not fit this model: {exc}") from exc
    wrapped = {name: m for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    served = {}
    for name, module in wrapped.items():
        # The layers of bitsandbytes are linear ones, too.
        if not (isinstance(module, LoraLayer) and isinstance(module.base_layer, nn.Linear)):
            raise OperatorError(f"lora.target_modules name {name}, which is not a linear layer")
        parent, _, child = name.rpartition(".")
        down, up = module.lora_A["default"], module.lora_B["default"]
        assert isinstance(down, nn.Linear), "LoRA factors of a linear layer are linear layers"
        assert isinstance(up, nn.Linear), "LoRA factors of a linear layer are linear layers"
        served[name] = LoraLinear(module.base_layer, down.in_features, up.out_features)
        setattr(model.get_submodule(parent), child, served[name])
    return served


def _shapes(linears: dict[str, LoraLinear], rank: int) -> Factors:
    """Factor names as PEFT saves them, A before B for each module."""
    shapes: Factors = {}
    nothing = np.float32(0)
    for name, linear in linears.items():
        prefix = f"base_model.model.{name}"
        shapes[f"{prefix}.lora_A.weight"] = np.broadcast_to(nothing, (rank, linear.inside))
        shapes[f"{prefix}.lora_B.weight"] = np.broadcast_to(nothing, (linear.outside, rank))
    return shapes
