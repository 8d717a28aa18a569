"""The frozen base model, loaded alike by every peer that computes with it: whole, or in 4 or 8 bits.

A policy is base plus adapter, so learner and samplers must round the base alike, or the importance ratio of
fresh groups is far from 1 (docs/adr/0013).
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from protocol.errors import OperatorError, one_line

EIGHT = 8


def load_base(model_dir: Path, device: torch.device, *, dtype: str, bits: int | None = None) -> Any:
    """A causal language model from a local directory, on ``device`` and in evaluation mode.

    ``bits`` None holds the weights in ``dtype``; 4 and 8 hold those of the linear layers but the LM head in
    so many, and compute in ``dtype``. Raises OperatorError if the directory holds no causal language model,
    or if it cannot be held so here.
    """
    if bits is not None and find_spec("bitsandbytes") is None:
        raise OperatorError(f"model.bits = {bits} needs bitsandbytes: pip install 'grpo-node[quantized]'")
    weights: torch.dtype = getattr(torch, dtype)
    quantized: dict[str, Any] = {}
    if bits is not None:
        quantized = {"quantization_config": _quantization(bits, weights), "device_map": {"": device}}
    faults = (OSError, ValueError, *((RuntimeError, ImportError) if quantized else ()))
    try:
        base: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=weights, attn_implementation="sdpa", local_files_only=True, **quantized
        )
    except faults as exc:
        if quantized:
            raise OperatorError(one_line(f"model.bits = {bits} does not work on {device}: {exc}")) from exc
        raise OperatorError(f"{model_dir} is not a causal language model: {exc}") from exc
    return evaluated(base if quantized else base.to(device=device))


def with_adapter(model: Any, config: LoraConfig) -> PeftModel:
    """``model`` with PEFT's layers in it. Raises ValueError if ``target_modules`` match nothing."""
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.24 for a property by its old name; nobody here can act on that.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    return adapted


def evaluated(model: Any) -> Any:
    """``model`` in evaluation mode, so that nothing drops out.

    Layers of 4 bits stay in training mode, which has no other effect: on CPUs with bf16 units bitsandbytes
    0.50 otherwise repacks their weights in the first forward pass, and gradients are wrong from then on.
    """
    model.eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True
    return model


def _quantization(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with its scales in 8 bits (QLoRA, arXiv 2305.14314), or LLM.int8 (arXiv 2208.07339)."""
    if bits == EIGHT:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
