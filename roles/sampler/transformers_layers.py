"""The two forward passes of decoding by layers of our own, for models built like Llama.

Fewer and larger operations than the model's own code: queries, keys and values come from one product, gate
and up from another, queries and keys are rotated together, and rows are a plain matrix. Who uses this
compares it with the model's own forward pass first: an architecture that looks the same and computes
something else is found so.

Legend: T tokens of all rows in one matrix, C prompts, L tokens of the longest, N rows, H query heads, K
key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from roles.sampler.transformers_cache import LAYER, SharedCache, Step
from roles.sampler.transformers_linear import merged
from roles.sampler.transformers_lora import Serving, Site

ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer: merged products by role, each with the number of its LoRA site."""

    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module
    first_site: int
    norm: nn.Module
    mlp_norm: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    activation: Any


def looks_like_llama(model: Any) -> bool:
    """Whether every part that these layers know is there and of the expected kind, and no other."""
    config = model.config.get_text_config()
    body, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    layers = getattr(body, "layers", None)
    if layers is None or type(head) is not nn.Linear or not hasattr(body, "rotary_emb"):
        return False
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        return False
    return all(_has_the_parts(layer) for layer in layers)


def _has_the_parts(layer: Any) -> bool:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    linears = [getattr(attention, name, None) for name in ATTENTION_PARTS]
    linears += [getattr(mlp, name, None) for name in MLP_PARTS]
    children = {name for name, _ in layer.named_children()}
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and children == {"self_attn", "mlp", *NORMS}
        and hasattr(mlp, "act_fn")
        and getattr(attention, "sliding_window", None) is None
    )


class LlamaLayers:
    """A model's weights, merged and packed. The model they are taken from is of no use afterwards."""

    def __init__(self, model: Any, targets: Sequence[str], serving: Serving) -> None:
        """``targets`` are the paths of modules that carry LoRA."""
        sites: list[Site] = []
        self._serving = serving
        self._embed, self._rotary, self._norm = (
            model.model.embed_tokens,
            model.model.rotary_emb,
            model.model.norm,
        )
        attention = model.model.layers[0].self_attn
        self._size = attention.head_dim
        self._heads = attention.q_proj.out_features // self._size
        self._kv_heads = attention.k_proj.out_features // self._size
        self._scale = attention.scaling
        self._layers = []

        def product(path: str, *parts: str) -> nn.Module:
            parent = model.get_submodule(path)
            names = [f"{path}.{part}".removeprefix(".") for part in parts]
            linears = [getattr(parent, part) for part in parts]
            outs = tuple(linear.out_features for linear in linears)
            sites.append(Site(outs, tuple(name if name in targets else None for name in names)))
            result = merged(linears)
            for part in parts:
                delattr(parent, part)
            return result

        for number, layer in enumerate(model.model.layers):
            path = f"model.layers.{number}"
            first_site = len(sites)
            self._layers.append(
                _Layer(
                    qkv=product(f"{path}.self_attn", "q_proj", "k_proj", "v_proj"),
                    o=product(f"{path}.self_attn", "o_proj"),
                    gate_up=product(f"{path}.mlp", "gate_proj", "up_proj"),
                    down=product(f"{path}.mlp", "down_proj"),
                    first_site=first_site,
                    norm=layer.input_layernorm,
                    mlp_norm=layer.post_attention_layernorm,
                    q_norm=getattr(layer.self_attn, "q_norm", None),
                    k_norm=getattr(layer.self_attn, "k_norm", None),
                    activation=layer.mlp.act_fn,
                )
            )
        self._head_site = len(sites)
        self._head = product("", "lm_head")
        self.sites = tuple(sites)
        served = {name for site in sites for name in site.names if name is not None}
        assert served == set(targets), "every linear layer of such a model is one of those above"

    def prefill(self, ids_CL: Tensor, mask_CL: Tensor | None) -> tuple[Tensor, list[LAYER]]:
        """Run prompts that are padded on the left: the last token's logits [C, V], and each layer's cache."""
        chunks, length = ids_CL.shape
        positions = torch.arange(length, device=ids_CL.device).expand(chunks, -1)
        seen = None
        if mask_CL is not None:
            positions = (mask_CL.long().cumsum(-1) - 1).clamp(min=0)
            causal = torch.ones((length, length), dtype=torch.bool, device=ids_CL.device).tril()
            # Padding sees itself, so that its softmax has something to sum.
            itself = torch.eye(length, dtype=torch.bool, device=ids_CL.device)
            seen = (causal & mask_CL[:, None, None, :]) | itself
        kept: list[LAYER] = []

        def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            heads = (t.view(chunks, length, -1, self._size).transpose(1, 2) for t in (query, key, value))
            q, k, v = heads
            kept.append((k, v))
            shared = self._heads // self._kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            out = scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=self._scale)
            return out.transpose(1, 2).reshape(chunks * length, self._heads, self._size)

        hidden = self._body(ids_CL.reshape(-1), positions, attend)
        return self._logits(hidden.view(chunks, length, -1)[:, -1]), kept

    def decode(self, tokens_N: Tensor, positions_N: Tensor, cache: SharedCache, step: Step) -> Tensor:
        """One more token for every row: logits [N, V]."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return cache.attend(layer, step, query, key, value, scale=self._scale)

        return self._logits(self._body(tokens_N, positions_N.unsqueeze(0), attend))

    def _body(self, ids_T: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """All layers: hidden states [T, hidden]. ``positions`` are T in any shape of two dimensions."""
        hidden: Tensor = self._embed(ids_T)
        cos, sin = (t.reshape(len(ids_T), 1, -1) for t in self._rotary(hidden.unsqueeze(0), positions))
        tokens, size = len(ids_T), self._size
        for number, layer in enumerate(self._layers):
            flat = self._apply(layer.qkv, layer.first_site, layer.norm(hidden))
            heads = flat.view(tokens, -1, size)
            value = heads[:, self._heads + self._kv_heads :]
            turned = heads[:, : self._heads + self._kv_heads]
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = turned[:, : self._heads], turned[:, self._heads :]
                turned = torch.cat([layer.q_norm(query), layer.k_norm(key)], 1)
            turned = _rotated(turned, cos, sin)
            out = attend(number, turned[:, : self._heads], turned[:, self._heads :], value)
            hidden = hidden + self._apply(layer.o, layer.first_site + 1, out.reshape(tokens, -1))
            gate, up = self._apply(layer.gate_up, layer.first_site + 2, layer.mlp_norm(hidden)).chunk(2, -1)
            hidden = hidden + self._apply(layer.down, layer.first_site + 3, layer.activation(gate) * up)
        return hidden

    def _apply(self, product: nn.Module, site: int, x: Tensor) -> Tensor:
        return self._serving.add(site, product(x), x)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._apply(self._head, self._head_site, self._norm(hidden))
        return logits


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) on [T, heads, D], halves rather than neighbours in pairs."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
