"""How many floating-point operations a step needs, and what share of the device's peak it reached (MFU).

A multiply-add is two. Counted is what training LoRA factors over a frozen base needs: no gradient of the
base's weights, the LM head at scored tokens only, and layers once even where they are recomputed. This is
less than the usual ``6 x parameters x tokens``, so the share is never flattered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel

from roles.learner.torch_adapter import causal_model, factor_parameters
from roles.learner.torch_logprobs import PaddedRows
from roles.learner.torch_packed_row import PackedRow

PEAKS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX A6000": 154.8e12,
}
"""Dense bf16 operations a second with fp32 sums, by CUDA device name, as the data sheets give them."""


def peak(devices: Iterable[torch.device], dtype: torch.dtype) -> float | None:
    """Operations a second that ``devices`` could do together; None where one is not known, or in fp32."""
    if dtype == torch.float32:
        return None
    names = [torch.cuda.get_device_name(d) if d.type == "cuda" else d.type for d in devices]
    return sum(PEAKS[name] for name in names) if all(name in PEAKS for name in names) else None


def attended_pairs(lengths: Iterable[int]) -> int:
    """Pairs of a token and one that it attends to, in causal rows of ``lengths`` tokens."""
    return sum(length * (length + 1) // 2 for length in lengths)


def pairs_of(row: PackedRow | PaddedRows) -> int:
    """The same in a row of a step: a completion attends to its prompt and to itself."""
    if isinstance(row, PaddedRows):
        return attended_pairs(row.attention.sum(-1).tolist())
    pairs = attended_pairs(segment.prompt for segment in row.segments)
    for segment in row.segments:
        pairs += attended_pairs(segment.completions) + segment.prompt * sum(segment.completions)
    return pairs


@dataclass(frozen=True, slots=True)
class Amount:
    """What a step computes on."""

    forwarded: int
    """Tokens that go through the layers."""
    scored: int
    """Tokens whose logits are computed."""
    pairs: int
    """See ``attended_pairs``."""


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes of one adapted model that decide how many operations a token takes."""

    base: int
    """Weights of the frozen linear layers without the LM head."""
    factors: int
    """Numbers in the LoRA factors."""
    head: int
    """Weights of the LM head."""
    attention: int
    """Layers times heads times head size; a sliding window is not taken into account."""

    @classmethod
    def of(cls, model: PeftModel) -> Work | None:
        """Measure ``model``; None for mixtures of experts, where a token meets only some of the weights."""
        causal = causal_model(model)
        config = causal.config.get_text_config()
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts")):
            return None
        head = causal.get_output_embeddings()
        linears = {
            id(module): module.in_features * module.out_features
            for name, module in causal.named_modules()
            if isinstance(module, torch.nn.Linear) and ".lora_" not in name and module is not head
        }
        heads = config.num_attention_heads
        return cls(
            base=sum(linears.values()),
            factors=sum(factor.numel() for factor in factor_parameters(model).values()),
            head=head.weight.numel(),
            attention=config.num_hidden_layers * heads * _head_size(config, heads),
        )

    def forward(self, amount: Amount) -> int:
        """Operations of a forward pass."""
        through_layers = amount.forwarded * (self.base + self.factors)
        return 2 * (through_layers + amount.scored * self.head + 2 * amount.pairs * self.attention)

    def backward(self, amount: Amount) -> int:
        """Operations of its backward pass: inputs' gradients everywhere, weights' for the factors alone."""
        through_layers = amount.forwarded * (self.base + 2 * self.factors)
        return 2 * (through_layers + amount.scored * self.head + 4 * amount.pairs * self.attention)


def speed_metrics(
    work: Work | None, peak_flops: float | None, amount: Amount, seconds: float, *, genesis: bool = False
) -> dict[str, float]:
    """Speed of forward and backward passes that took ``seconds``; ``genesis``: it was scored as well (KL).

    What cannot be known is left out.
    """
    if seconds <= 0:
        return {}
    metrics = {
        "perf/fwd_bwd_s": seconds,
        "perf/forwarded_tok_s_fwd_bwd": amount.forwarded / seconds,
    }
    if work is not None:
        done = work.forward(amount) * (2 if genesis else 1) + work.backward(amount)
        metrics["perf/tflop_s_fwd_bwd"] = done / seconds / 1e12
        if peak_flops:
            metrics["perf/mfu_fwd_bwd"] = done / seconds / peak_flops
    return metrics


def _head_size(config: Any, heads: int) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)
