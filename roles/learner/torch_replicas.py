"""Several devices of one machine: a replica of the model on each, the rows of a step dealt out among them.

    rows ─ deal ─▶ replica 0: backward ─┐
                   replica 1: backward ─┴─ gather: sum on replica 0 ─▶ one optimizer step ─▶ spread to all

The loss's divisors span the whole step, so the shares that the devices compute add up to the loss and the
gradient of one device; only the order of a sum differs. Sums are taken in the order of the devices, so a step
repeats bit for bit. With one device nothing is copied and no thread is started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import Parameter

from roles.learner.policy import Sample
from roles.learner.torch_adapter import factor_parameters

Result = TypeVar("Result")


def deal(costs: Sequence[int], hands: int) -> list[list[int]]:
    """Deal rows of ``costs`` tokens out to ``hands`` devices, as lists of indices in ascending order.

    The costliest row first, each to whoever has least so far (Graham 1969: at most 4/3 of the best possible
    balance). Deterministic; with fewer rows than devices some get none.
    """
    dealt: list[list[int]] = [[] for _ in range(hands)]
    loads = [0] * hands
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        dealt[least].append(index)
        loads[least] += costs[index]
    return [sorted(hand) for hand in dealt]


def deal_prompts(samples: Sequence[Sample], hands: int) -> list[list[int]]:
    """Deal samples out, those of one prompt together, so that it is computed once; lists of indices."""
    groups: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt_token_ids.tobytes(), []).append(index)
    members = list(groups.values())
    costs = [
        len(samples[group[0]].prompt_token_ids) + sum(len(samples[index].token_ids) for index in group)
        for group in members
    ]
    return [sorted(index for group in hand for index in members[group]) for hand in deal(costs, hands)]


class Replicas:
    """The same adapted model on one or more devices. The first holds the factors that count."""

    def __init__(self, models: Sequence[PeftModel]) -> None:
        """Take over ``models``, equal but for their devices; ``spread`` makes their factors equal."""
        self.models = tuple(models)
        self._factors = [factor_parameters(model) for model in models]
        names = [tuple(factors) for factors in self._factors]
        assert names.count(names[0]) == len(names), "replicas of one model carry the same factors"
        self._threads = ThreadPoolExecutor(len(models), "replica") if len(models) > 1 else None
        self.spread()

    def __len__(self) -> int:
        """How many there are."""
        return len(self.models)

    @property
    def factors(self) -> dict[str, Parameter]:
        """The first replica's factors by name: what the optimizer steps."""
        return self._factors[0]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where each replica is."""
        return tuple(next(iter(factors.values())).device for factors in self._factors)

    def each(self, work: Callable[[int], Result]) -> list[Result]:
        """Call ``work`` with the number of every replica, each on a thread of its own; results in order.

        Waits for all of them also if one fails, and raises what the first of the failed ones raised.
        """
        if self._threads is None:
            return [work(0)]
        futures = [self._threads.submit(work, replica) for replica in range(len(self))]
        wait(futures)
        return [future.result() for future in futures]

    def zero_gradients(self) -> None:
        """Forget what earlier backward passes left, everywhere."""
        for factors in self._factors:
            for factor in factors.values():
                factor.grad = None

    def gather(self) -> None:
        """Add the other replicas' gradients to the first's, in the order of the devices."""
        first = list(self.factors.values())
        for others in self._factors[1:]:
            if all(factor.grad is None for factor in others.values()):
                continue  # no row was dealt to it
            parts = _split(_joined([_gradient(factor) for factor in others.values()], first[0].device), first)
            for factor, gradient in zip(first, parts, strict=True):
                factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)

    @torch.no_grad()
    def spread(self) -> None:
        """Copy the first replica's factors to the others."""
        for others in self._factors[1:]:
            copies = list(others.values())
            parts = _split(_joined(list(self.factors.values()), copies[0].device), copies)
            for factor, number in zip(copies, parts, strict=True):
                factor.copy_(number)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _gradient(factor: Parameter) -> Tensor:
    return torch.zeros_like(factor) if factor.grad is None else factor.grad


def _joined(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """All numbers in one vector on ``device``: one transfer instead of hundreds."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = vector.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
