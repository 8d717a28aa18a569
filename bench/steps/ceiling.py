"""How fast a step could be on this machine, and where its time goes (``bench.learner --profile``).

The ceiling is what torch reaches in fp32 matrix products of the model's own shapes, on the same threads in
the same process. A step can hardly be faster than the operations that it needs at that speed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.steps.batch import StepBatch
from roles.learner.torch_adapter import causal_model
from roles.learner.torch_flops import Amount, Work, attended_pairs

ROWS = 1024
"""Tokens of the measured products."""
REPEATS = 5
OPERATORS = 10
"""How many operators a profile lists."""


def profile_of(model: Any, batch: StepBatch, step: Callable[[], object]) -> dict[str, float]:
    """Ceilings in GFLOP/s, what the step needs in TFLOP and seconds at the ceiling, and its operators.

    ``needed`` counts every row's own prompt, ``needed_shared`` each prompt once. Rows of no advantage are
    not needed.
    """
    work = Work.of(model)
    assert work is not None, "a mixture of experts"
    body, head = ceilings(causal_model(model))
    found = {"ceiling_body_gflop_s": body / 1e9, "ceiling_head_gflop_s": head / 1e9}
    for name, amount in (("needed", every_row(batch)), ("needed_shared", shared(batch))):
        operations = work.forward(amount) + work.backward(amount)
        of_head = 4 * amount.scored * work.head
        found[f"{name}_tflop"] = operations / 1e12
        found[f"{name}_s"] = (operations - of_head) / body + of_head / head
    return found | {f"operator/{name}": seconds for name, seconds in operators(step).items()}


def ceilings(causal: Any) -> tuple[float, float]:
    """Operations a second in the layers' linear maps, and in the LM head, forward and backward alike."""
    head = causal.get_output_embeddings()
    shapes = Counter(
        tuple(module.weight.shape)
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name and module is not head
    )
    sizes = {shape: count * shape[0] * shape[1] for shape, count in shapes.items()}
    body = sum(sizes.values()) / sum(size / product_speed(*shape) for shape, size in sizes.items())
    return body, product_speed(*head.weight.shape)


def product_speed(width_out: int, width_in: int) -> float:
    """Operations a second of a linear map and of its gradient towards its input, together."""
    weight, rows, gradient = (
        torch.randn(shape) for shape in ((width_out, width_in), (ROWS, width_in), (ROWS, width_out))
    )

    def both() -> tuple[Tensor, Tensor]:
        return nn.functional.linear(rows, weight), gradient @ weight

    both()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        both()
        times.append(time.perf_counter() - started)
    return 4 * ROWS * width_out * width_in / min(times)


def every_row(batch: StepBatch) -> Amount:
    """Each row with advantage by itself; nothing is predicted from a row's last token."""
    lengths = batch.lengths[batch.advantages != 0]
    rows = (batch.prompts.shape[1] + lengths - 1).tolist()
    return Amount(sum(rows), int(lengths.sum()), attended_pairs(rows))


def shared(batch: StepBatch) -> Amount:
    """Each prompt once, and the completions of the rows with advantage."""
    teaching = batch.advantages != 0
    prompt, completions = batch.prompts.shape[1], (batch.lengths[teaching] - 1).tolist()
    prompts = len(np.unique(batch.prompts[teaching], axis=0))
    pairs = prompts * attended_pairs([prompt]) + attended_pairs(completions) + prompt * sum(completions)
    return Amount(prompts * prompt + sum(completions), int(batch.lengths[teaching].sum()), pairs)


def operators(step: Callable[[], object]) -> dict[str, float]:
    """Seconds that one step spends in each operator itself, the largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events: list[Any] = list(profile.key_averages())
    events.sort(key=lambda event: -event.self_cpu_time_total)
    return {event.key: event.self_cpu_time_total / 1e6 for event in events[:OPERATORS]}
