"""Packing: which samples share a forward pass."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Cut samples of ``lengths`` tokens into micro-batches, as lists of indices, longest first.

    Neighbours in length share a batch, so that little is padded: rows times the longest row stays
    within ``tokens_max``. A sample longer than that is alone in its batch. Deterministic.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if room == 0:
            batches.append([])
            room = max(1, tokens_max // max(1, lengths[index]))
        batches[-1].append(index)
        room -= 1
    return batches
