"""Devices: what ``auto`` means on this machine, and whether those asked for are there."""

from __future__ import annotations

from protocol.errors import OperatorError

KINDS = ("cpu", "cuda", "mps")

CHOICES = "auto, cpu, cuda, cuda:N, mps, or several as in cuda:0,cuda:1"


def choose_device(wanted: str) -> str:
    """The device to compute on; ``auto`` is CUDA, else MPS, else the CPU.

    Several, with commas between, are one learner's: a replica of the model on each. Imports torch. Raises
    OperatorError if one is unknown, absent, named twice, or of another kind than the first.
    """
    import torch

    if wanted == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    found = []
    for name in wanted.split(","):
        try:
            device = torch.device(name)
            if device.type not in KINDS:
                raise NotImplementedError(device.type)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as exc:
            raise OperatorError(f"--device {wanted}: not on this machine; use {CHOICES}") from exc
        found.append(device)
    if len({(device.type, device.index or 0) for device in found}) < len(found):
        raise OperatorError(f"--device {wanted}: one device is named twice")
    if len({device.type for device in found}) > 1:
        raise OperatorError(f"--device {wanted}: several devices must be of one kind")
    return wanted


def only_device(chosen: str, role: str) -> str:
    """The one device of a role that cannot use several. Raises OperatorError if there are several."""
    if "," in chosen:
        raise OperatorError(f"--device {chosen}: a {role} uses one device; start one {role} for each")
    return chosen
