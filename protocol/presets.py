"""Loss presets: published objectives as numbers of ``LossSpec``, one table, each with its paper.

A preset is a word of run files (``[loss] preset = "gspo"``). It becomes numbers when the file is read, and
any number that the file sets itself wins. So what peers share holds numbers only: a later version's table
cannot change a run that exists. ``grpo-node presets`` prints the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, float | str | bool]


class UnknownPreset(ValueError):
    """A run file names a preset that does not exist."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named point of ``LossSpec``; what it does not mention has the default."""

    paper: str
    settings: Settings
    remark: str = ""
    """Where the paper has something that is not a number of the loss, or gives no number."""


_GRPO: Settings = {"advantage_scale": "std", "aggregation": "sequence"}
_NO_CLIP_BELOW: Settings = {"detached_weight": True, "clip_low": 1.0}

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "arXiv 2402.03300", {**_GRPO, "kl_beta": 0.04}, "kl_beta = 0 saves a forward pass in each step"
    ),
    "dr_grpo": Preset(
        "arXiv 2503.20783",
        {"aggregation": "constant"},
        "aggregation_tokens is sampling.max_new_tokens unless the run file says otherwise",
    ),
    "dapo": Preset(
        "arXiv 2503.14476",
        {"advantage_scale": "std", "aggregation": "token", "clip_high": 0.28, "mask_truncated": True},
        "groups without spread count in the divisor, where the paper samples others instead; its length "
        "penalty would be a reward",
    ),
    "gspo": Preset(
        "arXiv 2507.18071",
        {**_GRPO, "ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        "clips almost everything once groups are stale: keep max_staleness small",
    ),
    "cispo": Preset(
        "arXiv 2506.13585",
        {**_NO_CLIP_BELOW, "advantage_scale": "std", "aggregation": "token", "clip_high": 4.0},
        "the paper gives no bound; 5 is that of ScaleRL (arXiv 2510.13786)",
    ),
    "rloo": Preset(
        "arXiv 2402.14740",
        {"advantage_baseline": "leave_one_out", "aggregation": "constant"},
        "the paper's sum over a completion, divided by a constant (sampling.max_new_tokens); the clip is "
        "PPO's, for groups that are stale",
    ),
    "two_sided_clip": Preset("arXiv 2505.07291", {**_GRPO, "dual_clip": 4.0}, "INTELLECT-2"),
    "aipo": Preset(
        "arXiv 2505.24034",
        {**_NO_CLIP_BELOW, "aggregation": "token", "clip_high": 1.0},
        "LlamaRL: weights of at most 2; the paper uses 2 to 10",
    ),
    "decoupled": Preset(
        "arXiv 2110.00641",
        {"advantage_scale": "std", "correction": "truncate", "correction_cap": 5.0},
        "with one pass a step the proximal policy is the learner's own: no second forward pass, and an idle "
        "clip; the cap is that of AReaL (arXiv 2505.24298)",
    ),
    "negative_mask": Preset(
        "arXiv 2512.02556",
        {**_GRPO, "correction": "negative_mask", "correction_cap": 1.65, "kl_unbiased": True},
        "DeepSeek-V3.2; the cap is exp(0.5). kl_unbiased matters once kl_beta is set",
    ),
}


def loss_settings(preset: str, given: Mapping[str, Any], max_new_tokens: Any) -> dict[str, Any]:
    """The loss table that ``preset`` and what is ``given`` beside it amount to.

    A constant divisor that nobody set is ``max_new_tokens``. Raises UnknownPreset.
    """
    if preset not in PRESETS:
        raise UnknownPreset(f"loss.preset: no preset {preset!r}; there are {', '.join(PRESETS)}")
    settings = {**PRESETS[preset].settings, **given}
    if settings.get("aggregation") == "constant":
        settings.setdefault("aggregation_tokens", max_new_tokens)
    return settings


def with_numbers(tables: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """A run file's tables with ``loss.preset`` resolved; ``max_new_tokens`` is its default.

    Raises UnknownPreset. Whatever else is wrong is left to ``RunSpec``.
    """
    loss, sampling = tables.get("loss"), tables.get("sampling")
    if not isinstance(loss, dict) or "preset" not in loss:
        return dict(tables)
    if isinstance(sampling, dict):
        max_new_tokens = sampling.get("max_new_tokens", max_new_tokens)
    given = {name: value for name, value in loss.items() if name != "preset"}
    return {**tables, "loss": loss_settings(str(loss["preset"]), given, max_new_tokens)}
