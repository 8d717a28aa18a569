"""The rows of a step: packed where the model allows it, padded elsewhere; either way the same loss.

Packing needs attention that sees exactly a prompt and one completion. A model whose layers attend in another
way (a sliding window, a state space) is trained on padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
import torch

from roles.learner.packing import Part, micro_batches, pack
from roles.learner.policy import Sample
from roles.learner.torch_attention import PACKED_ATTENTION
from roles.learner.torch_logprobs import PaddedRows, score
from roles.learner.torch_packed_row import PackedRow

log = structlog.get_logger(__name__)

DEVIATION_MAX = 1e-3
"""Of log-probabilities in fp32 between packed and padded rows of the probe."""
DEVIATION_MAX_ROUNDED = 0.1
"""The same where the base model is held in fewer bits."""

Row = PackedRow | PaddedRows


class Rows:
    """How samples are laid out for one model."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """``model`` is a causal language model; its attention is replaced if it can be packed."""
        self._device = device
        self.packed = _can_be_packed(model, device)

    def of(self, samples: Sequence[Sample], tokens_max: int) -> list[tuple[tuple[int, ...], Row]]:
        """Rows within ``tokens_max`` tokens each, with the indices of the samples in them."""
        if self.packed:
            rows = [PackedRow.of(samples, parts, self._device) for parts in pack(samples, tokens_max)]
            return [(row.samples, row) for row in rows]
        lengths = [len(sample.prompt_token_ids) + len(sample.token_ids) for sample in samples]
        batches = micro_batches(lengths, tokens_max)
        return [(tuple(some), PaddedRows.of([samples[i] for i in some], self._device)) for some in batches]


def _can_be_packed(model: Any, device: torch.device) -> bool:
    """Whether packed rows give what padded rows give, tried on a few tokens."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        log.info("rows_padded", reason=f"layers of {', '.join(sorted(kinds))}")
        return False
    samples = _probe()
    with torch.no_grad():
        padded = score(model, PaddedRows.of(samples, device)).logprobs
        model.set_attn_implementation(PACKED_ATTENTION)
        try:
            row = PackedRow.of(samples, [Part((0, 1), 0), Part((2,), 0)], device)
            deviation = float((score(model, row).logprobs - padded).abs().max())
        except (TypeError, ValueError, RuntimeError) as exc:
            deviation, reason = float("inf"), f"{type(exc).__name__}: {exc}"
        else:
            reason = f"log-probabilities differ by {deviation:.2g}"
    exact = next(model.parameters()).dtype == torch.float32
    if deviation <= (DEVIATION_MAX if exact else DEVIATION_MAX_ROUNDED):
        return True
    model.set_attn_implementation("sdpa")
    log.warning("rows_padded", reason=reason)
    return False


def _probe() -> list[Sample]:
    """Two samples of one prompt and one of another."""

    def sample(prompt: Sequence[int], completion: Sequence[int]) -> Sample:
        ids = np.array(completion, np.int32)
        logprobs = np.zeros(len(ids), np.float32)
        return Sample(np.array(prompt, np.int32), ids, logprobs, 0.0, truncated=False, temperature=1.0)

    return [sample((0, 1, 2), (3, 4, 5)), sample((0, 1, 2), (6, 1)), sample((5,), (4, 3, 2, 1))]
