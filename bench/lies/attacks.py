"""The attacks by name: what each sampler sends instead of honest work.

Attacks on what is sampled come twice: by the sampler that reports the log-probabilities of what it did,
and by the one that forges them (``, hidden``) with a forward pass under the policy it claims.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.lies.groups import Sent, copied, edited, forged, stopped_early, truncated, with_logprobs_of
from bench.lies.scene import CLAIMED, Scene

HIDDEN = ", hidden"
Make = Callable[[Scene, int], Awaitable[list[Sent]]]


@dataclass(frozen=True, slots=True)
class Variants:
    """Models that stand for what a cheating sampler may run instead."""

    eight_bit: Path
    smaller: Path
    top_k: int
    dtype: str = "float32"
    """Of every sampler's engine, the honest ones included."""


def attacks(variants: Variants) -> dict[str, Make]:
    """Every attack; ``honest`` is the first."""
    dtype = variants.dtype

    def sampled(**changes: object) -> Make:
        async def make(scene: Scene, groups: int) -> list[Sent]:
            return await scene.sample(groups, **({"dtype": dtype} | changes))  # type: ignore[arg-type]

        return make

    def hidden(make: Make) -> Make:
        async def forge(scene: Scene, groups: int) -> list[Sent]:
            return [with_logprobs_of(one, scene.facts(one)) for one in await make(scene, groups)]

        return forge

    def afterwards(change: Callable[[Sent, Scene], Sent]) -> Make:
        async def make(scene: Scene, groups: int) -> list[Sent]:
            return [change(one, scene) for one in await scene.sample(groups, dtype=dtype)]

        return make

    rng = np.random.default_rng(0)
    instead: dict[str, Make] = {
        "base instead of the adapter": sampled(version=0),
        "adapter five updates old": sampled(version=CLAIMED - 5),
        "adapter one update old": sampled(version=CLAIMED - 1),
        "temperature 0.8": sampled(temperature=0.8),
        "temperature 1.25": sampled(temperature=1.25),
        "greedy": sampled(top_k=1),
        f"top-k {variants.top_k}": sampled(top_k=variants.top_k),
        "8-bit weights": sampled(directory=variants.eight_bit),
        "a smaller model": sampled(directory=variants.smaller),
    }
    after: dict[str, Make] = {
        "tokens edited": afterwards(
            lambda one, scene: edited(one, rng, scene.recompute.vocabulary, frozenset(scene.eos_ids))
        ),
        "log-probabilities forged": afterwards(lambda one, _: forged(one, rng)),
        "copied rollouts": afterwards(lambda one, _: copied(one)),
        "EOS forced early": afterwards(lambda one, scene: stopped_early(one, scene.eos_ids[0])),
    }
    return {
        "honest": sampled(),
        **instead,
        **{name + HIDDEN: hidden(make) for name, make in instead.items()},
        **after,
        "tokens edited" + HIDDEN: hidden(after["tokens edited"]),
        "EOS forced early" + HIDDEN: hidden(after["EOS forced early"]),
        "another seed": sampled(seed_shift=1 << 40),
        "completions truncated": afterwards(lambda one, _: truncated(one)),
    }
