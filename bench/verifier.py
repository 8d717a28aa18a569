"""How many completions a second does a verifier score, and what does one hanging answer in a hundred cost?

Groups come as a verifier gives them to its scorer, several at once. The rate under hanging answers counts the
honest ones until the last of them has its score, those that share a group with a hanging one included.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence

from bench.harness import Goal, report, say
from protocol.runspec import RewardSpec
from roles.verifier.rewards.reward import Item
from roles.verifier.rewards.scorer import Scorer
from roles.verifier.verifier import CREDIT

WORKERS = 2
EXACT_ITEMS, MATH_ITEMS = 20_000, 3_000
HANGING_EVERY = 100
HANGING_ANSWER = r"\boxed{9^{9^{9^{9}}}}"
TIME_LIMIT_S = 5.0
GROUP_SIZE = 8
MATH = RewardSpec(name="math", timeout_s=TIME_LIMIT_S)
WORDS = "Let us look at the terms one after the other and see what is left of them. " * 20


def math_items(count: int) -> list[Item]:
    """Groups of GROUP_SIZE completions for one gold each, a quarter of them right, in ten forms."""
    rng = random.Random(0)
    items = []
    for k in range(count):
        n = 2 + k // GROUP_SIZE % 97
        forms = (
            (f"{n}", f"{n}"),
            (rf"\frac{{1}}{{{n}}}", f"1/{n}"),
            (rf"{n}\sqrt{{2}}", rf"\sqrt{{{2 * n * n}}}"),
            (f"({n},{n + 1})", f"({n}, {n + 1})"),
            (rf"\{{{n},{n + 1}\}}", f"{n + 1}, {n}"),
            (f"x^2-{n}x", f"x(x-{n})"),
            (f"x = {n}", f"{n}"),
            (rf"{n}\pi", rf"\pi \cdot {n}"),
            (rf"\frac{{{n}}}{{3}}", f"{n / 3:.6f}"),
            (f"{n * 1000}", rf"{n}\,000"),
        )
        gold, right = forms[k // GROUP_SIZE % len(forms)]
        wrong = forms[k // GROUP_SIZE % len(forms)][1].replace(str(n), str(n + 1 + rng.randrange(5)))
        items.append(Item(rf"{WORDS}\boxed{{{right if k % 4 == 0 else wrong}}}", gold))
    return items


async def exact_per_s() -> float:
    """Inline scoring of whole texts."""
    items = [Item(f"{WORDS}{k % 7}", f"{WORDS}{k % 5}") for k in range(EXACT_ITEMS)]
    async with Scorer([RewardSpec(name="exact")]) as scorer:
        began = time.perf_counter()
        for k in range(0, EXACT_ITEMS, GROUP_SIZE):
            await scorer.score(items[k : k + GROUP_SIZE])
        return EXACT_ITEMS / (time.perf_counter() - began)


async def math_per_s(scorer: Scorer, items: Sequence[Item]) -> tuple[float, float]:
    """Honest completions a second until no group waits but for a hanging answer; seconds until none does."""
    groups = [items[k : k + GROUP_SIZE] for k in range(0, len(items), GROUP_SIZE)]
    room, ends = asyncio.Semaphore(CREDIT), [0.0]

    async def score(group: Sequence[Item]) -> None:
        async with room:
            await scorer.score(group)
        if all(item.completion != HANGING_ANSWER for item in group):
            ends.append(time.perf_counter())

    began = time.perf_counter()
    await asyncio.gather(*map(score, groups))
    honest = sum(item.completion != HANGING_ANSWER for item in items)
    return honest / (max(ends) - began), time.perf_counter() - began


async def measure() -> None:
    """Measure and report."""
    say(f"exact: {EXACT_ITEMS} completions in line")
    exact = await exact_per_s()
    items = math_items(MATH_ITEMS)
    hanging = [
        Item(HANGING_ANSWER, "1") if k % HANGING_EVERY == HANGING_EVERY // 2 else item
        for k, item in enumerate(items)
    ]
    async with Scorer([MATH], workers=WORKERS) as scorer:
        await scorer.warm()
        say(f"math: {MATH_ITEMS} completions on {WORKERS} workers")
        math, _ = await math_per_s(scorer, items)
        say(f"math: the same, with every {HANGING_EVERY}th answer hanging for its {TIME_LIMIT_S:g} s")
        math_hanging, all_s = await math_per_s(scorer, hanging)
    figures = {
        "exact_per_s": exact,
        "math_per_s": math,
        "math_per_s_1pct_hanging": math_hanging,
        "seconds_1pct_hanging": all_s,
        "hanging_in_turn_s": MATH_ITEMS / HANGING_EVERY * TIME_LIMIT_S,
        "math_workers": WORKERS,
        "load": os.getloadavg()[0],
    }
    goals = [
        Goal("exact_per_s", exact, at_least=2000),
        Goal("math_per_s", math, at_least=200),
        Goal("share_kept_with_1pct_hanging", math_hanging / math, at_least=0.8),
    ]
    report(figures, goals)


if __name__ == "__main__":
    asyncio.run(measure())
