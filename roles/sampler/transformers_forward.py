"""The two forward passes of decoding by the model's own code, whatever its architecture.

Transformers calls the attention that is registered here: for a prompt it is plain scaled-dot-product
attention, for a step of decoding it is ``SharedCache.attend``. Everything else is the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from protocol.errors import OperatorError
from roles.sampler.transformers_cache import LAYER, SharedCache, Step
from roles.sampler.transformers_linear import PackedLinear, can_pack
from roles.sampler.transformers_lora import LoraLinear, Serving, Site, replace

SHARED_ATTENTION = "grpo_node_shared"
"""Name of this implementation among those of transformers."""

UNDERSTOOD = {"dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache"}
"""Settings of attention that decoding honours, or that change nothing here."""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """The implementation that transformers calls, with ``shared`` (a cache and its step) or without.

    ``query`` [N, H, T, D], ``key`` and ``value`` [N, K, T, D]; returns [N, T, H, D].
    """
    shared: tuple[SharedCache, Step] | None = settings.pop("shared", None)
    if shared is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if strange := sorted(name for name in settings.keys() - UNDERSTOOD if settings[name] is not None):
        raise OperatorError(f"attention with {strange[0]}; use engine vllm for such a model")
    cache, step = shared
    out = cache.attend(
        module.layer_idx,
        step,
        query[:, :, 0],
        key[:, :, 0],
        value[:, :, 0],
        scale=settings.get("scaling") or query.shape[-1] ** -0.5,
        window=settings.get("sliding_window"),
    )
    return out.unsqueeze(1), None


AttentionInterface.register(SHARED_ATTENTION, attend)
AttentionMaskInterface.register(SHARED_ATTENTION, sdpa_mask)


class _Passing(Cache):
    """What the model takes for its cache while decoding: keys and values go on to attention as they are."""

    def __init__(self) -> None:
        super().__init__(layers=[DynamicLayer()])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store nothing: attention does."""
        return key_states, value_states


class OwnForward:
    """A model's own forward pass, with LoRA sites put where its target modules were."""

    def __init__(self, model: Any, targets: Sequence[str], serving: Serving) -> None:
        """Take over ``model``: its linear layers are packed where that pays. ``targets`` carry LoRA."""
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._model = model
        self.sites = tuple(Site((model.get_submodule(name).out_features,), (name,)) for name in targets)
        for site, name in enumerate(targets):
            replace(model, name, LoraLinear(_packed(model.get_submodule(name)), serving, site))
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear:
                replace(model, name, _packed(module))
        # The public setter asks what the architecture supports; whether this works is tried out instead.
        model.config.get_text_config()._attn_implementation = SHARED_ATTENTION  # noqa: SLF001

    def prefill(self, ids_CT: Tensor, mask_CT: Tensor | None) -> tuple[Tensor, list[LAYER]]:
        """Run prompts that are padded on the left: the last token's logits [C, V], and each layer's cache."""
        positions = torch.arange(ids_CT.shape[1], device=ids_CT.device).expand_as(ids_CT)
        if mask_CT is not None:
            positions = (mask_CT.long().cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache()
        logits = self._forward(ids_CT, positions, mask_CT, cache)
        layers: list[Any] = list(cache.layers)
        return logits, [(layer.keys, layer.values) for layer in layers]

    def decode(self, tokens_N: Tensor, positions_N: Tensor, cache: SharedCache, step: Step) -> Tensor:
        """One more token for every row: logits [N, V]."""
        # A mask of four dimensions is passed on as it is, so the model makes none.
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=tokens_N.device)
        ids_N1, positions_N1 = tokens_N.unsqueeze(1), positions_N.unsqueeze(1)
        return self._forward(ids_N1, positions_N1, mask, _Passing(), shared=(cache, step))

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, **more: Any
    ) -> Tensor:
        out = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
            **more,
        )
        logits: Tensor = out.logits[:, -1]
        return logits


def _packed(linear: Any) -> nn.Module:
    plain = type(linear) is nn.Linear and can_pack(linear.weight)
    same: nn.Module = linear
    return PackedLinear(linear.weight, linear.bias) if plain else same
