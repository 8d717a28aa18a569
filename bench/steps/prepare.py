"""Makes the batch of a case for a model: ``python -m bench.steps.prepare MODEL CASE FILE``.

A process of its own, so that its memory is nobody else's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.steps.batch import CASES, StepBatch, draw, draw_factors
from bench.steps.plain import factors_of, logprobs_of, open_plain, rows_of, set_factors

NOISE = 0.1
"""Deviation of the sampler's log-probabilities from the learner's: enough that some ratios are clipped."""


def prepare(model_dir: Path, batch: StepBatch, seed: int = 0) -> StepBatch:
    """``batch`` with an adapter, and with what a sampler that is a little behind would have reported."""
    model = open_plain(model_dir).eval()
    factors = draw_factors({name: tuple(factor.shape) for name, factor in factors_of(model).items()})
    seen = replace(batch, factors=factors)
    set_factors(model, seen)
    noise = np.random.default_rng(seed).normal(0, NOISE, batch.logprobs.shape).astype(np.float32)
    with torch.no_grad():
        for row, length in enumerate(batch.lengths.tolist()):
            prompts, completions, mask, _, _ = rows_of(batch, row, 1)
            logprobs = logprobs_of(model, prompts, completions, mask)[0].numpy()
            seen.logprobs[row, :length] = np.minimum(logprobs + noise[row, :length], -1e-4)
    return seen


def main() -> None:
    """Draw, score, save."""
    model_dir, case, file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    vocabulary = json.loads((model_dir / "config.json").read_text("utf-8"))["vocab_size"]
    prepare(model_dir, draw(CASES[case], vocabulary)).save(file)


if __name__ == "__main__":
    main()
