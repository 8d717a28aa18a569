"""LoRA while serving: many adapters resident, each row of a batch under its own.

PEFT decides which modules carry LoRA and how their factors are called, so that names agree with the
learner's. A *site* is a place where a product with the base happens: one module, or several of the same
input merged into one. Its adapter is ``s·B(Ax)`` with the A of its modules side by side and their B on a
diagonal, in fp32, as PEFT computes it. Exchanging adapters is exchanging references, so a switch costs
nothing.

Merging B·A into W was measured and not adopted: it would save up to a tenth of a step, but costs a second
copy of the weights and a pass over all of them a switch, and rounds a bf16 update away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from protocol.errors import OperatorError
from protocol.runspec import LoraSpec
from roles.base_model import with_adapter
from roles.policy.compose import Factors


@dataclass(eq=False, frozen=True, slots=True)
class Adapter:
    """A policy's factors on the device, ready to serve: by site, A [in, r] and s·B [r, out]."""

    name: str
    sites: tuple[tuple[Tensor, Tensor] | None, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """What is computed together: output widths, and for each the name of its module if that carries LoRA."""

    outs: tuple[int, ...]
    names: tuple[str | None, ...]

    def factors(self, factors: Factors, scale: float, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Copy this site's part of a policy to the device."""
        parts = []
        column = 0
        for out, name in zip(self.outs, self.names, strict=True):
            if name is not None:
                a_name, b_name = factor_names(name)
                parts.append((factors[a_name], factors[b_name], column))
            column += out
        if not parts:
            return None
        a = np.concatenate([part[0] for part in parts]).T
        b = np.zeros((a.shape[1], column), np.float32)
        row = 0
        for a_part, b_part, start in parts:
            b[row : row + len(a_part), start : start + len(b_part)] = b_part.T * np.float32(scale)
            row += len(a_part)
        on_device = (torch.from_numpy(np.array(t, np.float32, order="C")).to(device) for t in (a, b))
        return next(on_device), next(on_device)


class Serving:
    """Which adapter serves which rows of the forward pass to come."""

    def __init__(self) -> None:
        self._runs: Sequence[tuple[slice, Adapter]] = ()

    def serve(self, adapters: Sequence[Adapter]) -> None:
        """Row n goes under ``adapters[n]``; where all go under one, it may be named once.

        Costs two products for each run of neighbours under one adapter, so keep those together.
        """
        if all(adapter is adapters[0] for adapter in adapters):
            self._runs = [(slice(None), adapters[0])]
            return
        runs = runs_of(adapters)
        self._runs = [(slice(start, end), adapters[start]) for start, end in runs]

    def add(self, site: int, result: Tensor, x: Tensor) -> Tensor:
        """Add the adapters' part at ``site`` to ``result`` [T, out], in place; x is [T, in]."""
        assert self._runs, "adapters are chosen before the first forward pass"
        for rows, adapter in self._runs:
            pair = adapter.sites[site]
            if pair is None:
                continue
            a, b = pair
            mine = result[rows]
            if mine.dtype == a.dtype:
                mine.addmm_(x[rows] @ a, b)
            else:
                mine.copy_(torch.addmm(mine.to(a.dtype), x[rows].to(a.dtype) @ a, b))
        return result


def runs_of(kinds: Sequence[object]) -> list[tuple[int, int]]:
    """Stretches of neighbours that are the same object: start and end of each."""
    starts = [n for n, kind in enumerate(kinds) if n == 0 or kind is not kinds[n - 1]]
    return list(zip(starts, [*starts[1:], len(kinds)], strict=True))


class LoraLinear(nn.Module):
    """A base layer at its place in the model, plus what ``serving`` adds."""

    def __init__(self, base: nn.Module, serving: Serving, site: int) -> None:
        super().__init__()
        self.base = base
        self._serving, self._site = serving, site

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., in], giving [..., out]."""
        result: Tensor = self.base(x)
        flat = result.reshape(-1, result.shape[-1])
        return self._serving.add(self._site, flat, x.reshape(-1, x.shape[-1])).view(result.shape)


def find_targets(model: Any, lora: LoraSpec) -> dict[str, nn.Linear]:
    """The modules that PEFT would wrap, by their path in the model, which stays as it is.

    Raises OperatorError if ``target_modules`` match nothing, or something that is no linear layer.
    """
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT computes with any number
        use_rslora=lora.rslora,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with_adapter(model, config)
    except ValueError as exc:
        raise OperatorError(f"lora.target_modules do not fit this model: {exc}") from exc
    wrapped = {name: m for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    found = {}
    for name, module in wrapped.items():
        # The layers of bitsandbytes are linear ones, too.
        if not (isinstance(module, LoraLayer) and isinstance(module.base_layer, nn.Linear)):
            raise OperatorError(f"lora.target_modules name {name}, which is not a linear layer")
        found[name] = module.base_layer
        replace(model, name, module.base_layer)
    return found


def replace(model: Any, name: str, module: nn.Module) -> None:
    """Put ``module`` at the path ``name`` of the model."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def factor_names(module: str) -> tuple[str, str]:
    """How PEFT saves the factors A and B of a module."""
    prefix = f"base_model.model.{module}"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"


def factor_shapes(targets: dict[str, nn.Linear], rank: int) -> Factors:
    """Every factor that a policy must have, A before B for each module; the numbers mean nothing."""
    shapes: Factors = {}
    nothing = np.float32(0)
    for name, linear in targets.items():
        a, b = factor_names(name)
        shapes[a] = np.broadcast_to(nothing, (rank, linear.in_features))
        shapes[b] = np.broadcast_to(nothing, (linear.out_features, rank))
    return shapes
