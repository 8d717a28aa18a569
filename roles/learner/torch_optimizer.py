"""AdamW over the LoRA factors: one step, and a state that a restarted learner goes on from exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import Parameter

from protocol.runspec import LearnerSpec
from roles.learner.policy import State

MOMENTS = ("exp_avg", "exp_avg_sq")


class FactorOptimizer:
    """AdamW (Loshchilov and Hutter 2019) over named fp32 factors."""

    def __init__(self, factors: Mapping[str, Parameter], spec: LearnerSpec) -> None:
        """Optimize ``factors`` in the order given."""
        self._factors = dict(factors)
        self._grad_norm_max = spec.grad_norm_max
        self._adam = torch.optim.AdamW(
            self._factors.values(),
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=1e-8,
            weight_decay=spec.weight_decay,
        )

    def zero_gradients(self) -> None:
        """Forget what earlier backward passes left."""
        self._adam.zero_grad(set_to_none=True)

    def step(self, learning_rate: float) -> float | None:
        """Clip the gradient's norm and step; returns the norm before clipping.

        Returns None, and changes nothing, when the gradient is not finite.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._factors.values(), self._grad_norm_max))
        if not math.isfinite(norm):
            return None
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        return norm

    def state(self) -> State:
        """A copy of both moments of every factor and of the number of steps; empty before the first."""
        saved: State = {}
        for name, factor in self._factors.items():
            if moments := self._adam.state.get(factor):
                saved[f"{name}.step"] = np.array([float(moments["step"])], np.float32)
                for moment in MOMENTS:
                    saved[f"{name}.{moment}"] = moments[moment].detach().cpu().numpy().copy()
        return saved

    def restore(self, state: State) -> None:
        """Return to a saved state. Raises ValueError, and changes nothing, if it belongs to other factors."""
        expected = {
            f"{name}.{moment}": tuple(factor.shape) if moment in MOMENTS else (1,)
            for name, factor in self._factors.items()
            for moment in ("step", *MOMENTS)
        }
        if state and {name: tensor.shape for name, tensor in state.items()} != expected:
            raise ValueError("the saved optimizer state belongs to other factors")
        self._adam.state.clear()
        for name, factor in self._factors.items() if state else ():
            self._adam.state[factor] = {
                "step": torch.tensor(float(state[f"{name}.step"][0])),
                **{
                    moment: torch.from_numpy(state[f"{name}.{moment}"].astype(np.float32)).to(factor.device)
                    for moment in MOMENTS
                },
            }
