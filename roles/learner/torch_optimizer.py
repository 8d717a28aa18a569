"""AdamW over the LoRA factors: one step, and a state that a restarted learner goes on from exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from protocol.learner_spec import LearnerSpec
from roles.learner.policy import State, at_hand

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
        self._background = ThreadPoolExecutor(1, "optimizer-state")
        self._copied = at_hand({})
        """The newest copy of the moments; they must not change before it is made."""

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
        wait([self._copied])
        self._adam.step()
        return norm

    def state(self) -> Future[State]:
        """A copy of both moments of every factor and of the number of steps; empty before the first.

        Made in the background, while the next step's forward and backward passes run.
        """
        held = {
            f"{name}.{part}": tensor
            for name, factor in self._factors.items()
            for part, tensor in self._adam.state.get(factor, {}).items()
        }
        self._copied = self._background.submit(_copies, held)
        return self._copied

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


def _copies(held: Mapping[str, Tensor]) -> State:
    return {name: np.atleast_1d(tensor.to("cpu", copy=True).numpy()) for name, tensor in held.items()}
