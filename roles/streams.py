"""Random streams: each rollout has its own, so that no two share randomness and none depends on the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def rollout_stream(seed: int, index: int) -> np.random.Generator:
    """The stream of rollout ``index`` of a request with ``seed`` (both below 2**64).

    Philox4x64 (Salmon et al. 2011) keyed with the pair: distinct keys are independent streams by design.
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))


def turn_seed(seed: int, index: int, turn: int) -> int:
    """The seed (below 2**63) of the request for a later ``turn``, from 1 on, of rollout ``index``.

    That request has one rollout, index 0, whose stream begins anew. Turn 0 is the task's own request.
    """
    return int(np.random.SeedSequence([seed, index, turn]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def turn_draws(seed: int, index: int, lengths: Sequence[int]) -> NDArray[np.float64]:
    """What the tokens of a rollout's turns were drawn with, one number each; ``lengths`` are the turns'."""
    streams = [rollout_stream(seed, index)]
    streams += [rollout_stream(turn_seed(seed, index, turn), 0) for turn in range(1, len(lengths))]
    return np.concatenate([stream.random(n) for stream, n in zip(streams, lengths, strict=True)])
