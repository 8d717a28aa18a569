"""Packing: which samples share a row, so that prompts are computed once and nothing is padded (pure).

    samples ─▶ groups of one prompt ─▶ parts that fit a row ─▶ rows of about the same length

A row costs the tokens that go through the model: each part's prompt once, and of every completion all but
the last token, from which nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roles.learner.policy import Sample


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one prompt that share it in a row: a whole group, or as much of it as fits."""

    samples: tuple[int, ...]
    """Their indices."""
    tokens: int
    """What it costs."""


def pack(samples: Sequence[Sample], tokens_max: int) -> list[list[Part]]:
    """Rows of parts, none above ``tokens_max`` unless one of its samples is.

    Deterministic, and independent of anything but the samples: the longest part first, each into the
    emptiest of as few rows as first-fit needs.
    """
    parts = [part for group in _groups(samples) for part in _split(samples, group, tokens_max)]
    parts.sort(key=lambda part: (-part.tokens, part.samples))
    rows = _into(parts, _rows_needed(parts, tokens_max), tokens_max)
    return sorted(rows, key=lambda row: (-sum(part.tokens for part in row), row[0].samples))


def micro_batches(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Cut samples of ``lengths`` tokens into padded micro-batches, as lists of indices, longest first.

    For models that cannot be packed. Neighbours in length share a batch, so that little is padded: rows times
    the longest row stays within ``tokens_max``. A sample longer than that is alone in its batch.
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


def _groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of samples with the same prompt, in order of their first appearance."""
    groups: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt_token_ids.tobytes(), []).append(index)
    return list(groups.values())


def _split(samples: Sequence[Sample], group: Sequence[int], tokens_max: int) -> list[Part]:
    """A group as one part, or as few as fit a row each, about equally long; each repeats the prompt."""
    prompt = len(samples[group[0]].prompt_token_ids)
    costs = {index: len(samples[index].token_ids) - 1 for index in group}
    longest_first = sorted(group, key=lambda index: (-costs[index], index))
    room = max(1, tokens_max - prompt)
    count = max(1, -(-sum(costs.values()) // room))
    while True:
        shares: list[list[int]] = [[] for _ in range(min(count, len(group)))]
        loads = [0] * len(shares)
        for index in longest_first:
            least = loads.index(min(loads))
            shares[least].append(index)
            loads[least] += costs[index]
        if max(loads) <= room or count >= len(group):
            return [
                Part(tuple(sorted(share)), prompt + load)
                for share, load in zip(shares, loads, strict=True)
                if share
            ]
        count += 1


def _rows_needed(parts: Sequence[Part], tokens_max: int) -> int:
    """Rows that first-fit takes for parts in falling order of length."""
    rooms: list[int] = []
    for part in parts:
        fitting = next((i for i, room in enumerate(rooms) if part.tokens <= room), None)
        if fitting is None:
            rooms.append(tokens_max - part.tokens)
        else:
            rooms[fitting] -= part.tokens
    return len(rooms)


def _into(parts: Sequence[Part], count: int, tokens_max: int) -> list[list[Part]]:
    """Balanced rows, if that keeps within ``tokens_max`` with ``count`` rows; else with one more."""
    rows: list[list[Part]] = [[] for _ in range(count)]
    loads = [0] * count
    for part in parts:
        least = loads.index(min(loads))
        if rows[least] and loads[least] + part.tokens > tokens_max:
            return _into(parts, count + 1, tokens_max)
        rows[least].append(part)
        loads[least] += part.tokens
    return [row for row in rows if row]
