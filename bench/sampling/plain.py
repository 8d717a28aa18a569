"""The base model with PEFT's own layers around it, for arms that decode with transformers alone."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from bench.sampling.work import ALPHA, Work


def plain_model(work: Work) -> Any:
    """A model of transformers with the adapter on, not merged."""
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_pretrained(work.directory, dtype=torch.float32)
    config = LoraConfig(
        r=work.rank, lora_alpha=int(ALPHA), target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    shapes = {name: tuple(t.shape) for name, t in get_peft_model_state_dict(model).items()}
    factors = {name: torch.from_numpy(factor) for name, factor in work.factors(shapes).items()}
    set_peft_model_state_dict(model, factors)
    return model.eval().base_model.model
