"""Adapters as files: a plain PEFT directory for people, and factors as safetensors for peers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from protocol.clock import VectorClock
from protocol.errors import StoreCorrupt
from protocol.learner_spec import UpdateDtype
from protocol.runspec import LoraSpec
from roles.policy import bfloat16
from roles.policy.compose import WEIGHTS_FILE, Factors

CONFIG = "adapter_config.json"
CARD = "README.md"

_NAMES = {"float32": "F32", "bfloat16": "BF16"}
"""What a safetensors file calls them."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def factors_bytes(factors: Factors, dtype: UpdateDtype = "float32") -> bytes:
    """The factors as a safetensors file, the same bytes for the same factors.

    As bfloat16 they must have been rounded to it: nothing is lost here without being fed back.
    """
    if dtype == "bfloat16":
        return _bfloat16_bytes(factors)
    tensors = {name: np.ascontiguousarray(factors[name], np.float32) for name in sorted(factors)}
    return save(tensors, metadata={"format": "pt"})


def read_factors(path: Path, dtype: UpdateDtype = "float32") -> Factors:
    """Read a safetensors file as fp32. Raises StoreCorrupt if it is cut, not one, or of another dtype.

    Let ``roles.policy.compose.fault`` judge the tensors before use.
    """
    try:
        stored = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as exc:
        raise StoreCorrupt(f"{path.name} is not a safetensors file of factors: {exc}") from exc
    factors: Factors = {}
    for name, tensor in stored:
        if tensor["dtype"] != _NAMES[dtype]:
            raise StoreCorrupt(f"{path.name}: {name} is {tensor['dtype']}, not {dtype} as all of this run")
        if dtype == "bfloat16":
            numbers = bfloat16.from_bits(np.frombuffer(tensor["data"], "<u2"))
        else:
            numbers = np.frombuffer(tensor["data"], "<f4")
        factors[name] = numbers.reshape(tensor["shape"])
    return factors


def _bfloat16_bytes(factors: Factors) -> bytes:
    """What ``save`` would write if numpy had the type."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    tensors: list[bytes] = []
    end = 0
    for name in sorted(factors):
        tensors.append(bfloat16.to_bits(factors[name]).tobytes())
        start, end = end, end + len(tensors[-1])
        header[name] = {"dtype": "BF16", "shape": factors[name].shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *tensors))


def target_modules(factors: Factors) -> tuple[str, ...]:
    """Names of the linear layers that carry factors, sorted: ``('down_proj', 'gate_proj', …)``."""
    return tuple(sorted({re.sub(r"\.lora_[AB]\.weight$", "", name).rpartition(".")[2] for name in factors}))


def peft_directory(
    factors: Factors, spec: LoraSpec, base_model: str, clock: VectorClock, targets: Sequence[str] = ()
) -> dict[str, bytes]:
    """The files of a PEFT directory that ``PeftModel.from_pretrained`` and vLLM load as it is.

    ``base_model`` is the hub id or directory of the base model; ``targets`` are the adapted modules, by
    default the settings' own or, for ``all-linear``, those that carry factors.
    """
    if not targets:
        targets = target_modules(factors) if spec.target_modules == "all-linear" else spec.target_modules
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        # An integer where it is one: readers other than PEFT declare the field so.
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "use_rslora": spec.rslora,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    return {
        WEIGHTS_FILE: factors_bytes(factors),
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        CARD: _model_card(spec, base_model, clock).encode(),
    }


def _model_card(spec: LoraSpec, base_model: str, clock: VectorClock) -> str:
    """Front matter that the Hugging Face Hub accepts, and what a reader wants to know."""
    on_hub = HUB_ID.fullmatch(base_model) is not None
    front = [
        "library_name: peft",
        *([f"base_model: {base_model}"] if on_hub else []),
        "tags:",
        "- lora",
        "- grpo",
    ]
    counts = [f"| {learner} | {count} |" for learner, count in clock] or ["| (genesis: none) | 0 |"]
    variant = "rsLoRA" if spec.rslora else "LoRA"
    lines = [
        "---",
        *front,
        "---",
        "",
        f"# {variant} adapter for {base_model}",
        "",
        f"Trained with GRPO by grpo-node: rank {spec.rank}, alpha {spec.alpha:g}, scale {spec.scale:g}.",
        f"Policy version (clock): `{clock.text}`, digest `{clock.digest}`.",
        "",
        "| learner | updates |",
        "|---|---|",
        *counts,
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base_model}")',
        'policy = PeftModel.from_pretrained(base, "path/to/this/directory")',
        "```",
        "",
    ]
    return "\n".join(lines)
