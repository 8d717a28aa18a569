"""Every way to attend over a packed row gives what separate sequences give, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from roles.learner.torch_attention import (
    Segment,
    attention_by_flex,
    attention_by_mask,
    attention_by_parts,
    attention_for,
)

DIMENSION = 16
SHAPES = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 24), min_size=1, max_size=5)),
    min_size=1,
    max_size=3,
)


def segments_of(shapes: list[tuple[int, list[int]]]) -> list[Segment]:
    found: list[Segment] = []
    for prompt, completions in shapes:
        found.append(Segment(found[-1].end if found else 0, prompt, tuple(completions)))
    return found


def tensors(heads: tuple[int, int], length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, count, length, DIMENSION, generator=generator).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]


def separately(query: Tensor, key: Tensor, value: Tensor, segments: list[Segment], scale: float) -> Tensor:
    """Each prompt with each completion as a sequence of its own."""
    out = torch.zeros_like(query)
    for segment in segments:
        prompt = list(range(segment.start, segment.fork))
        for begin, end in [*segment.spans, (segment.fork, segment.fork)]:
            index = torch.tensor([*prompt, *range(begin, end)])
            q, k, v = (tensor[:, :, index] for tensor in (query, key, value))
            found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            own = index >= begin if end > begin else index < segment.fork
            out = out.index_copy(2, index[own], found[:, :, own])
    return out


@pytest.mark.parametrize("attention", [attention_by_parts, attention_by_mask])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@settings(max_examples=15, deadline=None)
@given(shapes=SHAPES)
def test_a_packed_row_is_its_sequences(attention, heads, shapes):
    segments = segments_of(shapes)
    length = segments[-1].end
    results = []
    ways: tuple[Any, ...] = (attention, separately)
    for way in ways:
        inputs = tensors(heads, length)
        out = way(*inputs, segments, DIMENSION**-0.5)
        out.backward(torch.sin(torch.arange(out.numel(), dtype=torch.float32)).reshape(out.shape))
        results.append([out.detach(), *(tensor.grad for tensor in inputs)])
    for packed, plain in zip(*results, strict=True):
        torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_the_same_pattern(monkeypatch):
    """Its kernel is compiled on CUDA; here it is run without, forward only."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr("roles.learner.torch_attention._flex", lambda: flex_attention.flex_attention)
    segments = segments_of([(5, [3, 0, 4]), (2, [6])])
    query, key, value = (tensor.detach() for tensor in tensors((4, 2), segments[-1].end))
    flexed = attention_by_flex(query, key, value, segments, 0.25)
    torch.testing.assert_close(flexed, attention_by_mask(query, key, value, segments, 0.25))


def test_each_device_has_its_way():
    ways = [attention_for(torch.device(kind)) for kind in ("cpu", "cuda", "mps")]
    assert ways == [attention_by_parts, attention_by_flex, attention_by_mask]
