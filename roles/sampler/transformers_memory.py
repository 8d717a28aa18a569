"""How much a device can hold, and what it says when that was too much."""

from __future__ import annotations

import os
from pathlib import Path

import torch

SHARES = {"cpu": 0.5, "cuda": 0.8, "mps": 0.6}
"""Part of the free memory that keys and values may take. The rest is for activations, logits, adapters, and
on a CPU for the other peers of the machine."""


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def tokens_that_fit(device: torch.device, token_bytes: int) -> int:
    """Tokens whose keys and values may be held at once."""
    return max(1, int(free_bytes(device) * SHARES.get(device.type, 0.5)) // token_bytes)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says that there was no memory; on CPU and MPS only its words tell."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc" in text


def give_back(device: torch.device) -> None:
    """Return memory that torch keeps for later to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
