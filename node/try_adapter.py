"""Completions of one prompt, by a base model alone and under an adapter, through plain PEFT.

Nothing of the ring is used here: what this prints is what any user of the exported adapter gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from node.models import load_tokenizer
from protocol.errors import OperatorError


def complete(
    model_dir: Path, adapter: Path, prompt: str, *, count: int, tokens: int, temperature: float, chat: bool
) -> list[tuple[str, str]]:
    """``count`` pairs (base, adapted); ``temperature`` 0 is greedy. Raises OperatorError on a bad adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(model_dir)
    text = prompt
    if chat:
        messages = [{"role": "user", "content": prompt}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not chat)
    base = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    try:
        model = PeftModel.from_pretrained(base, str(adapter)).eval()
    except (ValueError, KeyError, RuntimeError) as exc:
        raise OperatorError(f"{adapter}: not an adapter for {model_dir}: {exc}") from exc
    torch.manual_seed(0)
    how: dict[str, Any] = {
        "do_sample": temperature > 0,
        "max_new_tokens": tokens,
        "num_return_sequences": count,
    }
    if temperature > 0:
        how |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        how["num_return_sequences"] = 1

    def texts() -> list[str]:
        ids = model.generate(**inputs, **how)[:, inputs["input_ids"].shape[1] :]
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ids]

    with torch.no_grad(), model.disable_adapter():
        before = texts()
    with torch.no_grad():
        after = texts()
    return list(zip(before, after, strict=True))
