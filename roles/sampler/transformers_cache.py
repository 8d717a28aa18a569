"""The key-value cache of a batch: rows leave in place, and the buffers grow in blocks.

Legend: N rows, H heads, L tokens, D head size. Rows of different prompt lengths are padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

GROWTH_TOKENS = 64
"""Buffers grow by this much: a larger block wastes memory, a smaller one copies the cache more often."""


class RowLayer(DynamicLayer):
    """One layer's keys and values in buffers with room to grow; ``keys`` and ``values`` are views."""

    keys: Tensor
    values: Tensor

    def __init__(self, rows: int, prompt: Any) -> None:
        """Buffers for ``rows`` rows like those of ``prompt``, a filled layer of one prefill."""
        super().__init__()
        self._rows, self._length = rows, prompt.keys.shape[-2]
        self._key_buffer = self._new_buffer(prompt.keys)
        self._value_buffer = self._new_buffer(prompt.values)
        self.dtype, self.device = prompt.keys.dtype, prompt.keys.device
        self.is_initialized = True
        self._view()

    def _view(self) -> None:
        self.keys = self._key_buffer[: self._rows, :, : self._length]
        self.values = self._value_buffer[: self._rows, :, : self._length]

    def write_prompt(self, first_row: int, prompt: Any, repeats: Tensor) -> None:
        """Copy prefilled prompts into consecutive rows, ``repeats[i]`` rows for prompt i."""
        rows = slice(first_row, first_row + int(repeats.sum()))
        self.keys[rows] = prompt.keys.repeat_interleave(repeats, dim=0)
        self.values[rows] = prompt.values.repeat_interleave(repeats, dim=0)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append one step [N, H, 1, D] and return everything so far."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._length > self._key_buffer.shape[-2]:
            self._key_buffer = self._grown(self.keys)
            self._value_buffer = self._grown(self.values)
        self._view()
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def _new_buffer(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return like.new_empty((self._rows, heads, self._length + GROWTH_TOKENS, size))

    def _grown(self, old: Tensor) -> Tensor:
        new = self._new_buffer(old)
        new[:, :, : old.shape[-2]] = old
        return new

    def keep(self, rows: int, holes: Tensor, movers: Tensor) -> None:
        """Move rows ``movers`` into ``holes``, then forget everything from ``rows`` on."""
        if len(holes):
            self.keys[holes] = self.keys[movers]
            self.values[holes] = self.values[movers]
        self._rows = rows
        self._view()


class RowCache(Cache):
    """All layers of a batch."""

    def __init__(self, rows: int, prompt: Any) -> None:
        self._row_layers = [RowLayer(rows, layer) for layer in prompt.layers]
        super().__init__(layers=list(self._row_layers))

    def write_prompt(self, first_row: int, prompt: Any, repeats: Sequence[int]) -> None:
        """See ``RowLayer.write_prompt``; ``prompt`` is the cache of one prefill."""
        counts = torch.tensor(repeats, device=self._row_layers[0].keys.device)
        for row_layer, prompt_layer in zip(self._row_layers, prompt.layers, strict=True):
            row_layer.write_prompt(first_row, prompt_layer, counts)

    def keep(self, rows: int, holes: Tensor, movers: Tensor) -> None:
        """See ``RowLayer.keep``."""
        for layer in self._row_layers:
            layer.keep(rows, holes, movers)
