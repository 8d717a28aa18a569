"""Linear layers for decoding: on the CPU with weights packed for few rows.

A step multiplies 1 to some 100 rows with every weight. The plain product is made for more: with weights
laid out in advance, as oneDNN does for compiled models, two threads of a Zen 3 take a third to a half off
the time up to 32 rows, and more off the LM head (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

ROWS_EXPECTED = 16
"""The layout is chosen for so many rows and serves any number."""

_pack = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 there is no public function
_packed_linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001


class PackedLinear(nn.Module):
    """``Wx + b`` with a packed W, in fp32 on the CPU. The original weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = _pack(weight.detach().contiguous(), ROWS_EXPECTED)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., in], giving [..., out]."""
        result: Tensor = _packed_linear(x, self.weight, self.bias, "none", [], "")
        return result


class PlainLinear(nn.Module):
    """``Wx + b`` anywhere, for weights that are merged here."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., in], giving [..., out]."""
        return nn.functional.linear(x, self.weight, self.bias)


def can_pack(weight: Tensor) -> bool:
    """Whether packing is possible here and pays: half precision is slow on most CPUs, packed or not."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and bool(torch.backends.mkldnn.is_available())
    )


def merged(linears: Sequence[nn.Linear]) -> nn.Module:
    """One layer that computes what several compute of the same input, their outputs side by side."""
    weight = linears[0].weight if len(linears) == 1 else torch.cat([linear.weight for linear in linears])
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    bias = None
    if any(b is not None for b in biases):
        pairs = zip(linears, biases, strict=True)
        bias = torch.cat([ln.weight.new_zeros(ln.out_features) if b is None else b for ln, b in pairs])
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)
