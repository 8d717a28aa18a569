"""The base model with its LoRA factors: loading, naming, and where genesis comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from torch.nn import Parameter

from protocol.errors import OperatorError
from protocol.learner_spec import LearnerSpec
from protocol.runspec import LoraSpec, ModelSpec
from roles.base_model import evaluated, load_base, with_adapter
from roles.learner.torch_fused import fuse
from roles.learner.torch_logprobs import head_deviation
from roles.learner.torch_memory import recompute_layers
from roles.policy.compose import Factors

PROBE = tuple(range(8))
"""Token ids with which a model's LM head is checked."""

_AS_IT_IS = LearnerSpec()
"""Layers run once."""


def open_adapter(
    model_dir: Path,
    model: ModelSpec,
    lora: LoraSpec,
    device: torch.device,
    learner: LearnerSpec = _AS_IT_IS,
) -> PeftModel:
    """Load a base model, freeze it, and put fp32 LoRA factors on it. Dropout is off everywhere.

    ``learner`` says whether layers are run again for their gradient. Raises OperatorError when the directory
    holds no causal language model, when ``target_modules`` match nothing, or when the model's LM head does
    something that the learner cannot reproduce.
    """
    base = load_base(model_dir, device, dtype=model.dtype, bits=model.bits)
    deviation = head_deviation(base, PROBE)
    if not deviation <= (1e-3 if model.dtype == "float32" and model.bits is None else 0.1):
        raise OperatorError(
            f"the LM head of {model.ref} is not supported: log-probabilities differ by {deviation:.2g}"
        )
    try:
        adapted = with_adapter(base, _lora_config(lora))
    except ValueError as exc:
        raise OperatorError(f"lora.target_modules: {exc}") from exc
    evaluated(adapted)
    _check_targets(adapted, lora)
    fuse(adapted)
    if learner.gradient_checkpointing:
        recompute_layers(base)
    return adapted


def _lora_config(lora: LoraSpec) -> LoraConfig:
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # declared int, but PEFT only divides it
        use_rslora=lora.rslora,
        target_modules="all-linear" if lora.target_modules == "all-linear" else list(lora.target_modules),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _check_targets(model: PeftModel, lora: LoraSpec) -> None:
    """PEFT is content when one target of several matches; a misspelt one would silently stay untrained."""
    factors = factor_parameters(model)
    foreign = [name for name in factors if not re.search(r"\.lora_[AB]\.weight$", name)]
    if foreign:
        raise OperatorError(f"lora.target_modules: only linear layers can be adapted, not {foreign[0]}")
    modules = {name.rpartition(".lora_")[0] for name in factors}
    for target in lora.target_modules if isinstance(lora.target_modules, tuple) else ():
        if not any(module.endswith(f".{target}") for module in modules):
            raise OperatorError(f"lora.target_modules: the model has no layer {target}; check the spelling")


def factor_parameters(model: PeftModel) -> dict[str, Parameter]:
    """The trainable factors by PEFT tensor name, sorted: ``base_model.model.….lora_A.weight``."""
    return {
        name.replace(".default.weight", ".weight"): parameter
        for name, parameter in sorted(model.named_parameters())
        if parameter.requires_grad
    }


def genesis_factors(shapes: dict[str, tuple[int, ...]], seed: int) -> Factors:
    """Fresh factors: B zero, so that genesis is the base model; A uniform in +-1/sqrt(in) as PEFT draws it.

    A function of names, shapes and seed alone: no global random state, no device, no torch version.
    """
    random = np.random.default_rng(seed % (1 << 63))
    factors: Factors = {}
    for name in sorted(shapes):
        factors[name] = np.zeros(shapes[name], np.float32)
        if ".lora_A." in name:
            bound = shapes[name][1] ** -0.5
            factors[name] = random.uniform(-bound, bound, shapes[name]).astype(np.float32)
    return factors


def causal_model(model: PeftModel) -> Any:
    """The transformers model inside, whose layers carry the factors."""
    return model.get_base_model()
