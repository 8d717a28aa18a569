"""What a causal language model does with its last hidden states, so that logits can be made in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def logit_head(model: Any) -> Callable[[Tensor], Tensor]:
    """From hidden states [N, H] to logits [N, V] as ``model`` itself computes them.

    Follows the config's ``logit_scale`` (Cohere), ``logits_scaling`` (Granite, a divisor) and
    ``final_logit_softcapping`` (Gemma).
    """
    projection = model.get_output_embeddings()
    factor, softcap = head_settings(model)

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = projection(hidden)
        if factor != 1:
            logits = logits * factor
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return head


def head_settings(model: Any) -> tuple[float, float | None]:
    """What logits are multiplied with, and where they are capped."""
    config = model.config.get_text_config()
    scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return float(scale or 1) / float(divisor or 1), getattr(config, "final_logit_softcapping", None)
