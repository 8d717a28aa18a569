"""Larger models in the memory there is: layers that are run again for their gradient."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from protocol.errors import OperatorError


def recompute_layers(model: nn.Module) -> None:
    """Keep only the input of each decoder layer of ``model`` and run the layer again for its gradient.

    transformers' own switch works in training mode alone, in which dropout would be on. Raises OperatorError
    if the model has no layers of that kind.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise OperatorError("learner.gradient_checkpointing: this model has no layers that can be recomputed")
    for layer in layers:
        # Nothing in a layer draws random numbers: dropout is off.
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
