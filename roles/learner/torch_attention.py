"""Attention over packed rows: every completion attends its group's prompt, computed once, and itself.

    row:   prompt ┃ completion 0 ┃ completion 1 ┃ … ┃ next group's prompt ┃ …
    keys:  own    ┃ prompt, own  ┃ prompt, own  ┃

On the CPU each part is a flash kernel of its own, and the parts of a completion are merged by their
log-sum-exp; the backward pass uses the merged output and log-sum-exp for either part, which is exact
(Liu et al. 2023, ring attention, arXiv 2310.01889). Nothing of the size of a row squared exists, and the
prompt's keys and values are not copied. Elsewhere the same pattern is a mask: for flex attention on CUDA,
for plain scaled-dot-product attention on anything else.

Shape legend: H query heads, K key-value heads, L tokens of a row, P of a prompt, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "grpo_node_packed"
"""Name of this implementation among those of transformers."""

# The public function gives no log-sum-exp; tests/roles/learner/test_torch_attention.py holds these to it.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt and its completions within a row."""

    start: int
    """Where the prompt begins."""
    prompt: int
    """Its tokens."""
    completions: tuple[int, ...]
    """Tokens of each completion, the last one left out: nothing is predicted from it."""

    @property
    def fork(self) -> int:
        """Where the first completion begins."""
        return self.start + self.prompt

    @property
    def end(self) -> int:
        """Where the next segment begins."""
        return self.fork + sum(self.completions)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each completion."""
        ends = [self.fork]
        for length in self.completions:
            ends.append(ends[-1] + length)
        return list(itertools.pairwise(ends))


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """The implementation that transformers calls, with ``packed`` segments or without.

    ``query`` [1, H, L, D], ``key`` and ``value`` [1, K, L, D]; returns [1, L, H, D].
    """
    packed: Sequence[Segment] | None = settings.pop("packed", None)
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    scale = settings.get("scaling") or query.shape[-1] ** -0.5
    out = attention_for(query.device)(query, key, value, packed, scale)
    return out.transpose(1, 2).contiguous(), None


Attention = Callable[[Tensor, Tensor, Tensor, Sequence[Segment], float], Tensor]


def attention_for(device: torch.device) -> Attention:
    """The fastest way that a device has."""
    return {"cpu": attention_by_parts, "cuda": attention_by_flex}.get(device.type, attention_by_mask)


def attention_by_parts(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float
) -> Tensor:
    """On the CPU; shapes as for ``attend``, result [1, H, L, D]."""
    out: Tensor = _Parts.apply(query, key, value, tuple(segments), scale)
    return out


class _Parts(torch.autograd.Function):
    """Flash attention part by part."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        for segment in segments:
            for part in _parts_of(segment, query, key, value):
                part_out, part_sums = _flash(part.query, part.key, part.value, 0.0, part.causal, scale=scale)
                part.merge(part_out, part_sums, out, sums)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for segment in ctx.segments:
            for part in _parts_of(segment, query, key, value):
                found = _flash_backward(
                    part.of(gradient),
                    part.query,
                    part.key,
                    part.value,
                    part.of(out),
                    part.of(sums[..., None])[..., 0],
                    0.0,
                    part.causal,
                    scale=ctx.scale,
                )
                part.add(found, grads)
        return *grads, None, None


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries against some keys: a prompt or completion against itself, or completions against a prompt.

    The heads that share keys stand one after the other: beside each other as heads (keys repeated) where the
    kernel masks causally, and as further queries of one head where it does not, so that nothing is copied.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rows: slice
    keys: slice
    shared: int
    """Query heads for each key-value head."""
    causal: bool
    first: bool
    """Nothing was merged for these queries before."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a [1, H, L, …] tensor, in the shape of this part's query."""
        own = tensor[:, :, self.rows]
        return own if self.causal else _as_queries(own, self.shared)

    def back(self, tensor: Tensor) -> Tensor:
        """From the shape of this part's query to [1, H, rows, …]."""
        if self.causal:
            return tensor
        one, heads, queries = tensor.shape[:3]
        return tensor.reshape(one, heads * self.shared, queries // self.shared, *tensor.shape[3:])

    def merge(self, out: Tensor, sums: Tensor, total: Tensor, total_sums: Tensor) -> None:
        """Take a part's result into the row's."""
        out, sums = self.back(out), self.back(sums)
        if self.first:
            total[:, :, self.rows], total_sums[:, :, self.rows] = out, sums
            return
        before = total_sums[:, :, self.rows]
        both = torch.logaddexp(before, sums)
        kept, added = (before - both).exp()[..., None], (sums - both).exp()[..., None]
        total[:, :, self.rows] = (total[:, :, self.rows] * kept + out * added).to(total.dtype)
        total_sums[:, :, self.rows] = both

    def add(self, found: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add this part's gradients of query, key and value to the row's."""
        grads[0][:, :, self.rows] += self.back(found[0])
        for gradient, part in zip(grads[1:], found[1:], strict=True):
            if self.causal and self.shared > 1:
                part = part.unflatten(1, (-1, self.shared)).sum(2)
            gradient[:, :, self.keys] += part


def _parts_of(segment: Segment, query: Tensor, key: Tensor, value: Tensor) -> list[_Part]:
    shared = query.shape[1] // key.shape[1]
    prompt, rest = slice(segment.start, segment.fork), slice(segment.fork, segment.end)

    def own(rows: slice, *, first: bool) -> _Part:
        k, v = (tensor[:, :, rows].repeat_interleave(shared, 1) for tensor in (key, value))
        return _Part(query[:, :, rows], k, v, rows, rows, shared, causal=True, first=first)

    parts = [own(prompt, first=True)]
    if segment.end > segment.fork:
        queries = _as_queries(query[:, :, rest], shared)
        k, v = key[:, :, prompt], value[:, :, prompt]
        parts.append(_Part(queries, k, v, rest, prompt, shared, causal=False, first=True))
        parts += [own(slice(*span), first=False) for span in segment.spans if span[1] > span[0]]
    return parts


def _as_queries(tensor: Tensor, shared: int) -> Tensor:
    """[1, K·shared, L, …] as [1, K, shared·L, …]."""
    one, heads, queries, *rest = tensor.shape
    return tensor.reshape(one, heads // shared, shared * queries, *rest)


def attention_by_mask(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float
) -> Tensor:
    """Anywhere: one call a segment, with a mask of its size squared."""
    shared = query.shape[1] // key.shape[1]
    outs = []
    for segment in segments:
        rows = slice(segment.start, segment.end)
        k, v = (tensor[:, :, rows].repeat_interleave(shared, 1) for tensor in (key, value))
        mask = _mask(segment, query.device)
        outs.append(scaled_dot_product_attention(query[:, :, rows], k, v, attn_mask=mask, scale=scale))
    return torch.cat(outs, 2)


def _mask(segment: Segment, device: torch.device) -> Tensor:
    """Who sees whom within a segment, shape [its tokens, its tokens], True where seen."""
    part = _part_numbers([segment], device)
    index = torch.arange(len(part), device=device)
    causal = index[:, None] >= index[None, :]
    return causal & ((part[None, :] == 0) | (part[:, None] == part[None, :]))


def _part_numbers(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """0 for a prompt's tokens, k for those of its k-th completion, shape [L]."""
    numbers: list[int] = []
    lengths: list[int] = []
    for segment in segments:
        numbers += range(len(segment.completions) + 1)
        lengths += [segment.prompt, *segment.completions]
    counts = torch.tensor(lengths, device=device)
    return torch.tensor(numbers, device=device).repeat_interleave(counts)


def attention_by_flex(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float
) -> Tensor:
    """On CUDA: one compiled kernel that skips what is masked."""
    from torch.nn.attention.flex_attention import create_block_mask

    device, length = query.device, query.shape[2]
    part = _part_numbers(segments, device)
    sizes = torch.tensor([segment.end - segment.start for segment in segments], device=device)
    group = torch.arange(len(segments), device=device).repeat_interleave(sizes)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (group[q] == group[k]) & ((part[k] == 0) | (part[q] == part[k]))

    blocks = create_block_mask(sees, None, None, length, length, device=str(device))
    out: Tensor = _flex()(query, key, value, block_mask=blocks, scale=scale, enable_gqa=True)
    return out


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


AttentionInterface.register(PACKED_ATTENTION, attend)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)  # for rows that are padded, not packed
