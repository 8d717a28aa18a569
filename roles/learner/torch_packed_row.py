"""A packed row: prompts with their completions one after the other, as the model takes them.

Shape legend: L tokens of the row, N completion tokens of all its samples, one sample after the other. Where a
sample has a ``loss_mask``, the tokens that it masks are in the row, and not among the N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roles.learner.packing import Part
from roles.learner.policy import Sample
from roles.learner.torch_attention import Segment


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Samples that share a forward pass."""

    samples: tuple[int, ...]
    """Their indices, in the order of their rows below."""
    token_ids: Tensor
    """Shape [1, L]."""
    position_ids: Tensor
    """Place of each token in its own sequence, shape [1, L]."""
    segments: tuple[Segment, ...]
    rows: Tensor
    """Number of the sample that each completion token belongs to, shape [N]."""
    places: Tensor
    """Where in the row the hidden state stands that predicts it, shape [N]."""
    targets: Tensor
    """The completion tokens, shape [N]."""
    temperatures: Tensor
    """Temperature at which each was sampled, shape [N]."""

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return self.token_ids.numel()

    @classmethod
    def of(cls, samples: Sequence[Sample], parts: Sequence[Part], device: torch.device) -> PackedRow:
        """Lay out ``parts`` of ``samples``; raises ValueError on an empty prompt or completion."""
        layout = _Layout()
        for part in parts:
            layout.add([samples[index] for index in part.samples])
        order = tuple(index for part in parts for index in part.samples)
        lengths = [len(samples[index].token_ids) for index in order]
        trained = np.concatenate([samples[index].trained for index in order])
        arrays = (
            np.concatenate(layout.token_ids)[None],
            np.concatenate(layout.position_ids)[None],
            np.repeat(np.arange(len(order)), lengths)[trained],
            np.concatenate(layout.places)[trained],
            np.concatenate([np.asarray(samples[index].token_ids, np.int64) for index in order])[trained],
            np.repeat(np.array([samples[index].temperature for index in order], np.float32), lengths)[
                trained
            ],
        )
        ids, positions, rows, places, targets, temperatures = (
            torch.from_numpy(array).to(device) for array in arrays
        )
        return cls(order, ids, positions, tuple(layout.segments), rows, places, targets, temperatures)


class _Layout:
    """A row in the making."""

    def __init__(self) -> None:
        self.token_ids: list[np.ndarray] = []
        self.position_ids: list[np.ndarray] = []
        self.places: list[np.ndarray] = []
        self.segments: list[Segment] = []
        self._end = 0

    def add(self, samples: Sequence[Sample]) -> None:
        prompt = np.asarray(samples[0].prompt_token_ids, np.int64)
        if not len(prompt) or not all(len(sample.token_ids) for sample in samples):
            raise ValueError("prompts and completions need at least one token")
        lengths = tuple(len(sample.token_ids) - 1 for sample in samples)
        segment = Segment(self._end, len(prompt), lengths)
        self.token_ids.append(prompt)
        self.position_ids.append(np.arange(len(prompt)))
        for sample, (begin, end) in zip(samples, segment.spans, strict=True):
            self.token_ids.append(np.asarray(sample.token_ids[:-1], np.int64))
            self.position_ids.append(len(prompt) + np.arange(end - begin))
            # The prompt's last token predicts the first, each token the one after it.
            self.places.append(np.concatenate([[segment.fork - 1], np.arange(begin, end)]))
        self.segments.append(segment)
        self._end = segment.end
