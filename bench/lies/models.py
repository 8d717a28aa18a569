"""Models for liars to run: the same weights in 8 bits, and a smaller one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EIGHT_BITS_MAX = 127


def eight_bit(directory: Path, target: Path) -> Path:
    """A copy whose linear layers are rounded to 8 bits, a scale for each row (absmax)."""
    shutil.copytree(directory, target)
    for file in target.glob("*.safetensors"):
        weights = {
            name: _rounded(weight) if name.endswith("_proj.weight") else weight
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
    return target


def without_layers(directory: Path, target: Path, layers: int) -> Path:
    """A copy with only the first ``layers`` layers."""
    shutil.copytree(directory, target)
    for file in target.glob("*.safetensors"):
        kept = {
            name: weight
            for name, weight in load_file(file).items()
            if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
        }
        save_file(kept, file, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    (target / "config.json").write_text(json.dumps(config))
    return target


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / EIGHT_BITS_MAX
    return (weight / scale).round() * scale
