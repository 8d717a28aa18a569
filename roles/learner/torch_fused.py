"""Layers with gradients written by hand: the same numbers, with fewer copies made and less kept.

    adapted linear layer   y = x W^T + s (x A^T) B^T    added in place; keeps x and x A^T
    gated MLP              down(silu(gate x) * up x)    keeps x, gate x and up x; the product is made again
    RMS norm               w x / rms(x)                 keeps x and one number a token

Automatic differentiation keeps every intermediate of these, and writes each product and sum to new memory:
on a CPU that is a quarter of a step's time and half of its memory (docs/LOG.md). A layer is replaced only if
a few numbers through it come out the same; one that does something else stays as it is.

Shape legend: N tokens, I and O features in and out, R rank, F features within the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

log = structlog.get_logger(__name__)

ADAPTER = "default"
PROBE_TOKENS = 3
DEVIATION_MAX = 1e-4
"""Of a replaced layer from the one it replaces, relative to the largest number, where weights are fp32."""
DEVIATION_MAX_ROUNDED = 3e-2
"""The same for weights of fewer bits."""


@dataclass(frozen=True, slots=True)
class Weights:
    """An adapted linear layer in numbers."""

    base: Tensor
    """Frozen, shape [O, I]."""
    bias: Tensor | None
    a: Tensor
    """Shape [R, I], fp32."""
    b: Tensor
    """Shape [O, R], fp32."""
    scaling: float

    @classmethod
    def of(cls, module: Any) -> Weights:
        """Those of a linear layer of PEFT's."""
        base = module.base_layer
        factors = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
        return cls(base.weight, base.bias, *factors, float(module.scaling[ADAPTER]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``y`` [N, O] for ``x`` [N, I], and what the adapter made of ``x`` in between [N, R]."""
        y = linear(x, self.base, self.bias)
        inner = x.to(self.a.dtype) @ self.a.T
        return _add_product(y, inner, self.b.T, self.scaling), inner

    def backward(self, grad: Tensor, x: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``x``, ``a`` and ``b`` from that of ``y``."""
        through, grad_a, grad_b = self.backward_factors(grad, x, inner)
        return _add_product(grad @ self.base, through, self.a, 1.0), grad_a, grad_b

    def backward_factors(self, grad: Tensor, x: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the factors alone; first the gradient of ``inner``."""
        exact = grad.to(self.a.dtype)
        through = (exact @ self.b).mul_(self.scaling)
        grad_b = (exact.T @ inner).mul_(self.scaling)
        return through, through.T @ x.to(self.a.dtype), grad_b


def _add_product(to: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """``to`` + scaling * left @ right, in its place; rounded once where it is held in fewer bits."""
    if to.dtype == left.dtype:
        return to.addmm_(left, right, alpha=scaling)
    return to.add_(left @ right, alpha=scaling)


class _Linear(torch.autograd.Function):
    """One adapted linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, weights: Weights) -> Tensor:
        y, inner = weights.forward(x)
        ctx.save_for_backward(x, inner, a, b)
        ctx.weights = weights
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner = ctx.saved_tensors[:2]
        if not ctx.needs_input_grad[0]:  # the first layer's is the embedding
            return None, *ctx.weights.backward_factors(grad, x, inner)[1:], None
        return *ctx.weights.backward(grad, x, inner), None


class _GatedMlp(torch.autograd.Function):
    """Three adapted linear layers around ``silu(gate) * up``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        factors, layers = rest[:6], rest[6:]
        (gate, gate_inner), (up, up_inner) = (layer.forward(x) for layer in layers[:2])
        y, down_inner = layers[2].forward(silu(gate).mul_(up))
        ctx.save_for_backward(x, gate, up, gate_inner, up_inner, down_inner, *factors)
        ctx.layers = layers
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, gate_inner, up_inner, down_inner = ctx.saved_tensors[:6]
        to_gate, to_up, down = ctx.layers
        opened = silu(gate)
        grad_product, *of_down = down.backward(grad, opened * up, down_inner)
        grad_up = opened.mul_(grad_product)
        grad_gate = torch.ops.aten.silu_backward(grad_product.mul_(up), gate)
        grad_x, *of_gate = to_gate.backward(grad_gate, x, gate_inner)
        grad_x_up, *of_up = to_up.backward(grad_up, x, up_inner)
        return grad_x.add_(grad_x_up), *of_gate, *of_up, *of_down, None, None, None


class _RmsNorm(torch.autograd.Function):
    """``weight * x / sqrt(mean(x^2) + eps)``, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.float()
        inverse = (torch.linalg.vecdot(exact, exact)[..., None] / x.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (exact * inverse).to(x.dtype)
        return normed.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        slope = grad.float() * weight
        exact = x.float()
        along = torch.linalg.vecdot(slope, exact)[..., None] * inverse.pow(3) / x.shape[-1]
        return slope.mul_(inverse).addcmul_(exact, along, value=-1).to(x.dtype), None, None


Layer = Callable[[Tensor], Tensor]


def fuse(model: nn.Module) -> int:
    """Replace what layers of ``model`` do by the functions above where they give the same; returns how many.

    Modules, names and parameters stay as they are. ``model`` is adapted by PEFT, in evaluation mode; it must
    not be copied afterwards, since a copy's layers would compute with the weights of the original.
    """
    fused = 0
    for module in list(model.modules()):
        layer, features = _fused(module)
        if layer is not None and _same(module, layer, features):
            _replace(module, layer)
            fused += 1
    log.debug("layers_fused", count=fused)
    return fused


def _fused(module: Any) -> tuple[Layer | None, int]:
    """What may compute ``module``, and the features it takes; None for a module that we know nothing of."""
    if _is_plain(module):
        return partial(_linear, module), module.in_features
    linears = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if all(_is_plain(linear) for linear in linears):
        return partial(_mlp, linears), module.gate_proj.in_features
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return partial(_norm, module), module.weight.shape[0]
    return None, 0


def _is_plain(module: object) -> bool:
    """Whether it is a linear layer with one adapter and nothing else."""
    return (
        type(module) is LoraLinear
        and type(module.base_layer) is nn.Linear
        and list(module.lora_A) == [ADAPTER] == module.active_adapters
        and not module.lora_variant
        and not module.lora_bias[ADAPTER]
        and not module.fan_in_fan_out
    )


def _linear(module: LoraLinear, x: Tensor) -> Tensor:
    weights = Weights.of(module)
    y: Tensor = _Linear.apply(x.flatten(0, -2), weights.a, weights.b, weights)
    return y.view(*x.shape[:-1], -1)


def _mlp(linears: list[Any], x: Tensor) -> Tensor:
    layers = [Weights.of(linear) for linear in linears]
    factors = [factor for layer in layers for factor in (layer.a, layer.b)]
    y: Tensor = _GatedMlp.apply(x.flatten(0, -2), *factors, *layers)
    return y.view(*x.shape[:-1], -1)


def _norm(module: Any, x: Tensor) -> Tensor:
    y: Tensor = _RmsNorm.apply(x, module.weight, module.variance_epsilon)
    return y


def _replace(module: nn.Module, layer: Layer) -> None:
    """Let ``module`` compute by ``layer``, except where it is called in a way that we do not know."""
    original = module.forward
    adapted = [part for part in module.modules() if isinstance(part, LoraLinear)]

    def forward(x: Tensor, *rest: object, **options: object) -> Tensor:
        unusual = rest or options or any(part.disable_adapters or part.merged for part in adapted)
        y: Tensor = original(x, *rest, **options) if unusual else layer(x)
        return y

    module.forward = forward


def _same(module: nn.Module, layer: Layer, features: int) -> bool:
    """Whether both give the same for a few numbers; B is zero at first, so other ones are tried."""
    weight = next(module.parameters())
    factors = [p for name, p in module.named_parameters() if ".lora_B." in f".{name}"]
    kept = [factor.detach().clone() for factor in factors]
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(1, PROBE_TOKENS, features, generator=numbers).to(weight.device, weight.dtype)
    with torch.no_grad():
        for factor in factors:
            factor.copy_(torch.randn(factor.shape, generator=numbers))
        try:
            ours, theirs = layer(x), module(x)
        finally:
            for factor, numbers_before in zip(factors, kept, strict=True):
                factor.copy_(numbers_before)
    limit = DEVIATION_MAX if weight.dtype == torch.float32 else DEVIATION_MAX_ROUNDED
    return bool((ours - theirs).abs().max() <= limit * theirs.abs().max())
