"""Keys and values of all live rows: each prompt once for its whole group, each completion in a row of its
own.

    prompts [C, K, P, D]   one entry for each chunk, read by all of its rows
    own     [N, K, L, D]   what each row has sampled; live rows are packed at the front

Buffers are allocated in blocks and written in place: a step copies nothing but the new token. A query attends
both parts at once: scores of either part, one softmax over both, and the sum of both products. So a token
costs the memory traffic of its own completion plus its share of the prompt's.

Legend: C chunks, N rows, W rows of the widest chunk, H query heads, K key-value heads, R = H / K, P tokens
of the longest prompt, L of the longest completion, D head size, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

LAYER = tuple[Tensor, Tensor]
"""Keys and values of one layer."""

TOKENS_BLOCK = 64
ROWS_BLOCK = 8
"""Buffers grow by these: larger ones waste memory, smaller ones copy the cache more often."""

SPARE_TOKENS = 2 * TOKENS_BLOCK
"""Buffers longer than needed by more than this shrink."""


@dataclass(slots=True)
class Step:
    """Where everything lies in one step; the same for all layers."""

    rows: int
    chunks: int
    prompt: int
    """Longest prompt."""
    own: int
    """Longest completion, this step's token included."""
    columns: Tensor | int
    """Where each row writes its token; a number if it is the same for all."""
    grid: Tensor | None
    """Rows by chunk [C * W], short chunks filled up with row 0; None if there is one chunk."""
    place: Tensor | None
    """Where each row stands in ``grid`` [N]."""
    mask: Tensor | None
    """Added to scores [N, 1, 1, P + L]; None if every row sees everything."""
    distance: Tensor
    """Tokens between the query and each key [N, P + L], for sliding windows."""
    windows: dict[int, Tensor] = field(default_factory=dict)

    def mask_for(self, window: int | None) -> Tensor | None:
        """The mask of a layer that looks back ``window`` tokens, or as far as there are any."""
        if window is None:
            return self.mask
        if window not in self.windows:
            far = self.distance[:, None, None, :] >= window
            mask = torch.zeros_like(far, dtype=torch.float32) if self.mask is None else self.mask
            self.windows[window] = mask.masked_fill(far, -torch.inf)
        return self.windows[window]


class SharedCache:
    """All layers' keys and values. Used by one thread."""

    def __init__(self) -> None:
        self._prompts: list[LAYER] = []
        self._own: list[LAYER] = []
        self._prompt_lengths: list[int] = []
        self._chunk_of = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)
        """Tokens in each row's own part."""
        self._layout: tuple[Tensor, Tensor] | None = None

    @property
    def rows(self) -> int:
        """Live rows."""
        return len(self._chunk_of)

    @staticmethod
    def tokens_held(rows: int, longest_new: int, chunks: int, longest_prompt: int) -> int:
        """Tokens that buffers may come to hold for rows and prompts like these, padding included."""
        own = -(-longest_new // TOKENS_BLOCK) * TOKENS_BLOCK + SPARE_TOKENS
        prompt = -(-longest_prompt // TOKENS_BLOCK) * TOKENS_BLOCK + SPARE_TOKENS
        return rows * own + chunks * prompt

    @property
    def positions(self) -> list[int]:
        """Where each row's next token stands in its sequence."""
        prompts = np.array(self._prompt_lengths, np.int64)
        result: list[int] = (prompts[self._chunk_of] + self._lengths).tolist()
        return result

    def join(self, prompts: Sequence[LAYER], lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Take in prefilled prompts [C, K, T, D] a layer, padded on the left, with ``counts`` rows each."""
        first, rows = len(self._prompt_lengths), self.rows
        self._prompt_lengths += lengths
        chunks = np.repeat(np.arange(first, first + len(lengths)), counts)
        self._chunk_of = np.concatenate([self._chunk_of, chunks])
        self._lengths = np.concatenate([self._lengths, np.zeros(len(chunks), np.int64)])
        self._layout = None
        if not self._own:
            self._prompts = [(keys[:0], values[:0]) for keys, values in prompts]
            self._own = list(self._prompts)
        longest, own = max(self._prompt_lengths), int(self._lengths.max()) + 1
        for layer, new in enumerate(prompts):
            buffers = _sized(self._prompts[layer], first, len(self._prompt_lengths), longest, rows_block=1)
            self._prompts[layer] = buffers
            for buffer, tensor in zip(buffers, new, strict=True):
                for index, length in enumerate(lengths):
                    buffer[first + index, :, :length] = tensor[index, :, tensor.shape[2] - length :]
            self._own[layer] = _sized(self._own[layer], rows, self.rows, own)

    def keep(self, alive: Sequence[bool], runs: Sequence[tuple[int, int]]) -> list[int]:
        """Let the other rows leave and close the gaps; rows of a run (start, end) stay neighbours.

        Returns who now stands in each place. At least one row stays: a new cache is better than an empty one.
        """
        order = packed(alive, runs)
        used = int(self._lengths.max())
        self._move(self._own, order, used)
        self._chunk_of, self._lengths = self._chunk_of[order], self._lengths[order]
        inhabited = np.zeros(len(self._prompt_lengths), bool)
        inhabited[self._chunk_of] = True
        if not inhabited.all():
            chunks = packed(inhabited.tolist(), [(0, len(inhabited))])
            self._move(self._prompts, chunks, max(self._prompt_lengths))
            renamed = np.zeros(len(inhabited), np.int64)
            renamed[chunks] = np.arange(len(chunks))
            self._chunk_of = renamed[self._chunk_of]
            self._prompt_lengths = [self._prompt_lengths[chunk] for chunk in chunks]
        self._layout = None
        return order

    @staticmethod
    def _move(layers: Sequence[LAYER], order: Sequence[int], used: int) -> None:
        moved = [(place, source) for place, source in enumerate(order) if place != source]
        if not moved:
            return
        places, sources = torch.tensor(moved, device=layers[0][0].device).T
        for layer in layers:
            for buffer in layer:
                buffer[places, :, :used] = buffer[sources, :, :used]

    def begin(self) -> Step:
        """Make room for one more token of every row and tell where everything lies."""
        lengths, device = self._lengths, self._own[0][0].device
        own = int(lengths.max()) + 1
        for layer, buffers in enumerate(self._own):
            self._own[layer] = _sized(buffers, self.rows, self.rows, own)
        prompts = np.array(self._prompt_lengths, np.int64)
        longest = int(prompts.max())
        mine = prompts[self._chunk_of]
        keys = np.concatenate(
            [
                np.broadcast_to(np.arange(longest), (self.rows, longest)),
                mine[:, None] + np.arange(own),
            ],
            axis=1,
        )
        distance = (mine + lengths)[:, None] - keys
        hidden = distance < 0
        hidden[:, :longest] = np.arange(longest) >= mine[:, None]
        mask = None
        if hidden.any():
            mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32))
            mask = mask[:, None, None, :].to(device)
        even = bool((lengths == lengths[0]).all())
        grid, place = self._grid(device)
        return Step(
            rows=self.rows,
            chunks=len(prompts),
            prompt=longest,
            own=own,
            columns=int(lengths[0]) if even else torch.from_numpy(lengths.copy()).to(device),
            grid=grid,
            place=place,
            mask=mask,
            distance=torch.from_numpy(distance).to(device),
        )

    def end(self) -> None:
        """The step's token is in every layer."""
        self._lengths += 1

    def _grid(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Rows by chunk, and each row's place in that."""
        chunks = len(self._prompt_lengths)
        if chunks == 1:
            return None, None
        if self._layout is None:
            width = int(np.bincount(self._chunk_of).max())
            grid = np.zeros((chunks, width), np.int64)
            place = np.zeros(self.rows, np.int64)
            filled = np.zeros(chunks, np.int64)
            for row, chunk in enumerate(self._chunk_of):
                grid[chunk, filled[chunk]] = row
                place[row] = chunk * width + filled[chunk]
                filled[chunk] += 1
            self._layout = torch.from_numpy(grid.reshape(-1)).to(device), torch.from_numpy(place).to(device)
        return self._layout

    def attend(
        self,
        layer: int,
        step: Step,
        query_NHD: Tensor,
        key_NKD: Tensor,
        value_NKD: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Store this step's keys and values and attend to everything before them: [N, H, D]."""
        rows, heads, size = query_NHD.shape
        kv_heads = key_NKD.shape[1]
        own_keys, own_values = (buffer[:rows] for buffer in self._own[layer])
        if isinstance(step.columns, int):
            own_keys[:, :, step.columns], own_values[:, :, step.columns] = key_NKD, value_NKD
        else:
            everyone = torch.arange(rows, device=query_NHD.device)
            own_keys[everyone, :, step.columns] = key_NKD
            own_values[everyone, :, step.columns] = value_NKD
        own_keys, own_values = (t[:, :, : step.own].flatten(0, 1) for t in (own_keys, own_values))
        keys, values = (b[: step.chunks, :, : step.prompt].flatten(0, 1) for b in self._prompts[layer])
        query = (query_NHD * scale).reshape(rows, kv_heads, heads // kv_heads, size)
        to_prompt = _by_row(_product(_by_chunk(query, step), keys.transpose(1, 2)), step, kv_heads)
        to_own = _product(query.flatten(0, 1), own_keys.transpose(1, 2)).view(*query.shape[:3], step.own)
        scores = torch.cat([to_prompt, to_own], -1)
        if (mask := step.mask_for(window)) is not None:
            scores = scores + mask
        weights = torch.softmax(scores, -1).to(values.dtype)
        of_prompt, of_own = weights[..., : step.prompt], weights[..., step.prompt :]
        out = _by_row(_product(_by_chunk(of_prompt, step), values), step, kv_heads)
        out = out + _product(of_own.flatten(0, 1), own_values).view(out.shape)
        return out.to(query_NHD.dtype).reshape(rows, heads, size)


def _by_chunk(tensor_NKRX: Tensor, step: Step) -> Tensor:
    """Rows of a chunk side by side, so that they share one product with its prompt: [C * K, W * R, X]."""
    _, kv_heads, shared, size = tensor_NKRX.shape
    if step.grid is not None:
        tensor_NKRX = tensor_NKRX.index_select(0, step.grid)
    wide = tensor_NKRX.reshape(step.chunks, -1, kv_heads, shared, size)
    return wide.transpose(1, 2).reshape(step.chunks * kv_heads, -1, size)


def _by_row(tensor: Tensor, step: Step, kv_heads: int) -> Tensor:
    """Undo ``_by_chunk``: [C * K, W * R, X] as [N, K, R, X]."""
    size = tensor.shape[-1]
    width = step.rows if step.grid is None else len(step.grid) // step.chunks
    wide = tensor.view(step.chunks, kv_heads, width, -1, size).transpose(1, 2)
    flat = wide.reshape(step.chunks * width, kv_heads, -1, size)
    return flat if step.place is None else flat.index_select(0, step.place)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched product summed and returned in fp32, as flash kernels compute it."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    if left.device.type == "cuda":
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def packed(alive: Sequence[bool], runs: Sequence[tuple[int, int]]) -> list[int]:
    """Survivors run by run, within each in an order that leaves as many as possible where they are."""
    order: list[int] = []
    for start, end in runs:
        survivors = [place for place in range(start, end) if alive[place]]
        places = range(len(order), len(order) + len(survivors))
        movers = iter([place for place in reversed(survivors) if place not in places])
        order += [place if start <= place < end and alive[place] else next(movers) for place in places]
    return order


def _sized(layer: LAYER, used: int, rows: int, tokens: int, rows_block: int = ROWS_BLOCK) -> LAYER:
    """Buffers for so much: those given, or new ones with the first ``used`` entries if they are too small.

    New ones also replace buffers that a longer row has left far too long.
    """
    have_rows, _, have_tokens, _ = layer[0].shape
    wanted = -(-tokens // TOKENS_BLOCK) * TOKENS_BLOCK
    if rows <= have_rows and tokens <= have_tokens <= wanted + SPARE_TOKENS:
        return layer
    rows = -(-rows // rows_block) * rows_block
    kept = min(wanted, have_tokens)
    sized = []
    for old in layer:
        # Zeros: what no row has written yet is multiplied by 0, and must not be a NaN.
        new = old.new_zeros((rows, old.shape[1], wanted, old.shape[3]))
        new[:used, :, :kept] = old[:used, :, :kept]
        sized.append(new)
    return sized[0], sized[1]
