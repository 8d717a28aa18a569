"""Plain PEFT: the model with its adapter, and log-probabilities from the full logits of a padded batch.

    python -m bench.steps.plain MODEL BATCH --size 4     an arm of bench.learner

What a loop written in an afternoon does: rows padded on the right to the longest of their micro-batch, the
logits of every position, autograd, ``clip_grad_norm_``, AdamW.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.steps.arm import WARM_UP_TOKENS, ArmResult, arguments, forget_peak, held_bytes, measure
from bench.steps.batch import ALPHA, CLIP, RANK, TRAINED_RATE, StepBatch


def open_plain(model_dir: Path) -> Any:
    """The base model with a fresh adapter on all linear layers, fp32."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    config = LoraConfig(
        r=RANK, lora_alpha=int(ALPHA), target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def factors_of(model: Any) -> dict[str, Tensor]:
    """The trainable factors by PEFT tensor name."""
    return {
        name.replace(".default.weight", ".weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def set_factors(model: Any, batch: StepBatch) -> None:
    """Put the batch's adapter on ``model``, and touch every weight, so that none is still on disk only."""
    with torch.no_grad():
        for name, parameter in factors_of(model).items():
            parameter.copy_(torch.from_numpy(batch.factors[name]))
        for parameter in model.parameters():
            parameter.sum()


def logprobs_of(model: Any, prompts: Tensor, completions: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities of completion tokens, shape [R, C]; what lies outside ``mask`` is noise."""
    ids = torch.cat([prompts, completions], dim=1)
    attention = torch.cat([torch.ones_like(prompts), mask.to(prompts.dtype)], dim=1)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    of_completions = torch.log_softmax(logits[:, prompts.shape[1] - 1 : -1], dim=-1)
    return of_completions.gather(-1, completions[..., None])[..., 0]


def rows_of(batch: StepBatch, start: int, size: int) -> list[Tensor]:
    """Prompts, completions, mask, sampler's log-probabilities and advantages of some rows, trimmed."""
    chosen = slice(start, start + size)
    longest = int(batch.lengths[chosen].max())
    arrays = (batch.completions, batch.mask, batch.logprobs)
    trimmed = [torch.from_numpy(array[chosen, :longest]) for array in arrays]
    return [
        torch.from_numpy(batch.prompts[chosen]),
        *trimmed,
        torch.from_numpy(batch.advantages[chosen])[:, None],
    ]


def step(model: Any, optimizer: torch.optim.Optimizer, batch: StepBatch, size: int) -> tuple[float, float]:
    """Loss and gradient norm of one optimizer step in micro-batches of ``size`` rows."""
    total = 0.0
    for start in range(0, batch.lengths.size, size):
        prompts, completions, mask, sampler, advantages = rows_of(batch, start, size)
        ratio = (logprobs_of(model, prompts, completions, mask) - sampler).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        loss = per_token[mask].sum() / batch.trained_tokens
        loss.backward()
        total += float(loss.detach())
    norm = float(torch.nn.utils.clip_grad_norm_(factors_of(model).values(), 1.0))
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


def tiny(batch: StepBatch) -> StepBatch:
    """The first rows' first tokens, to warm up with."""
    cut = min(WARM_UP_TOKENS, int(batch.lengths.min()))
    return StepBatch(
        batch.prompts[:, :WARM_UP_TOKENS],
        batch.completions[:, :cut],
        np.full_like(batch.lengths, cut),
        batch.logprobs[:, :cut],
        batch.advantages,
        batch.factors,
    )


def main() -> None:
    """Load, warm up, measure."""
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    batch = StepBatch.load(options.batch)
    model = open_plain(options.model).eval()
    set_factors(model, batch)
    result = ArmResult("padded", f"{options.size} rows a micro-batch", loaded_bytes=held_bytes())
    optimizer = torch.optim.AdamW(factors_of(model).values(), lr=TRAINED_RATE, weight_decay=0.0)
    step(model, optimizer, tiny(batch), options.size)
    forget_peak()
    measure(result, lambda: step(model, optimizer, batch, options.size), options.steps)
    result.print()


if __name__ == "__main__":
    main()
