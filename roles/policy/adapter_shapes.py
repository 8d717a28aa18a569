"""Names and shapes of a run's factors, from the model's configuration alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM

from protocol.errors import OperatorError, one_line
from protocol.runspec import LoraSpec
from roles.base_model import with_adapter
from roles.policy.compose import Factors


def adapter_shapes(model_dir: Path, lora: LoraSpec) -> Factors:
    """Names and shapes of the factors that every policy has, without loading the model's weights.

    A before B for each module, named as PEFT saves them; the numbers mean nothing. Raises OperatorError if
    the directory holds no causal language model, or ``target_modules`` do not fit it.
    """
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(r=lora.rank, target_modules=targets, task_type="CAUSAL_LM")
    try:
        settings = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
    except (OSError, ValueError) as exc:
        raise OperatorError(f"{model_dir} is not a causal language model: {one_line(str(exc))}") from exc
    try:
        with torch.device("meta"):
            adapted = with_adapter(model, config)
    except ValueError as exc:
        raise OperatorError(f"lora.target_modules do not fit this model: {one_line(str(exc))}") from exc
    nothing = np.float32(0)
    shapes: Factors = {}
    for name, module in adapted.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        for factor, held in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
            if "default" not in held:
                raise OperatorError(f"lora.target_modules name {name}, which is not a linear layer")
            weight = held["default"].weight
            assert isinstance(weight, torch.Tensor), "LoRA factors of a linear layer are linear layers"
            shapes[f"{name}.{factor}.weight"] = np.broadcast_to(nothing, tuple(weight.shape))
    return shapes
