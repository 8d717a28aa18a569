"""Devices: what ``auto`` means on this machine, and whether the one asked for is there."""

from __future__ import annotations

from protocol.errors import OperatorError

KINDS = ("cpu", "cuda", "mps")


def choose_device(wanted: str) -> str:
    """The device to compute on; ``auto`` is CUDA, else MPS, else the CPU.

    Imports torch. Raises OperatorError if the device is unknown or absent.
    """
    import torch

    if wanted == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        if device.type not in KINDS:
            raise NotImplementedError(device.type)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        raise OperatorError(
            f"--device {wanted}: not on this machine; use auto, cpu, cuda, cuda:N or mps"
        ) from exc
    return wanted
