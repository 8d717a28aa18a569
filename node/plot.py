"""The reward curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

WINDOW = 10


def save_curve(
    path: Path, rewards: Sequence[float], evals: Sequence[tuple[float, float]], label: str
) -> Path:
    """Write a PNG: reward of every step, its moving mean, and held-out evaluations by version."""
    figure = Figure(figsize=(7.5, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(rewards) + 1)
    smooth = [sum(rewards[max(0, i - WINDOW) : i]) / min(i, WINDOW) for i in steps]
    axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="training, each step")
    axes.plot(steps, smooth, color="#08519c", linewidth=2, label=f"training, mean of {WINDOW}")
    if evals:
        versions, values = zip(*evals, strict=True)
        axes.plot(versions, values, "o-", color="#d94801", label="held-out problems")
    seen = [0.0, 1.02, *rewards, *(value for _, value in evals)]
    axes.set(xlabel="update", ylabel=label, ylim=(min(seen), max(seen)))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
    return path
