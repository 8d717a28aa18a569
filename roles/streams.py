"""Random streams: each rollout has its own, so that no two share randomness and none depends on the batch."""

from __future__ import annotations

import numpy as np


def rollout_stream(seed: int, index: int) -> np.random.Generator:
    """The stream of rollout ``index`` of a request with ``seed`` (both below 2**64).

    Philox4x64 (Salmon et al. 2011) keyed with the pair: distinct keys are independent streams by design.
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
