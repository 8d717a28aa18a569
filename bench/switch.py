"""What does a switch of policy cost a sampler under load, and how soon is the new policy sampled from?

Twice the same stretch of time under the same load, and every few seconds one more group whose first token is
waited for: once under one policy, once with a new policy loaded before each such group.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from statistics import median

import numpy as np
import structlog

from bench.harness import Goal, report, say
from bench.sampler import MODEL
from bench.sampling.ours import open_engine
from bench.sampling.work import WARM_UP_TOKENS, Work
from protocol.messages import SamplingParams
from roles.sampler.engine import SampleRequest
from roles.sampler.transformers_engine import TransformersEngine

SPEED_KEPT = 0.9
REACTION_S = 0.1
"""Time to the first token under a new policy beyond one prefill and one step of decoding under load."""


class Load:
    """So many groups in hand at any time; counts their tokens when a group is whole."""

    def __init__(self, engine: TransformersEngine, work: Work) -> None:
        self._engine, self._work = engine, work
        self._numbers = count()
        self._ended: list[tuple[float, int]] = []
        """When each group was whole, and its tokens."""
        self.stop = False

    async def run(self) -> None:
        """Keep a group in hand, one after the other."""
        while not self.stop:
            sampled = await self._engine.sample(request_of(self._work, next(self._numbers)))
            tokens = sum(len(rollout.token_ids) for rollout in sampled.rollouts)
            self._ended.append((time.perf_counter(), tokens))

    def tokens_per_s(self, start: float, end: float) -> float:
        """Of groups that became whole in a stretch of time."""
        return sum(tokens for at, tokens in self._ended if start <= at < end) / (end - start)


def request_of(work: Work, number: int, new_tokens: int | None = None) -> SampleRequest:
    """Another prompt for every number."""
    prompt = np.random.default_rng(number).integers(3, work.vocab_size, work.prompt_tokens, np.int32)
    params = SamplingParams(max_new_tokens=new_tokens or work.new_tokens)
    return SampleRequest(prompt, work.rows, params, number, None, deadline_s=3600.0)


async def every(seconds: float, times: int, work: Callable[[int], Awaitable[None]]) -> list[float]:
    """Begin ``work(n)`` every so many seconds, n from 1: how long each took."""
    took = []
    for number in range(1, times + 1):
        begun = time.perf_counter()
        await work(number)
        took.append(time.perf_counter() - begun)
        await asyncio.sleep(max(0.0, seconds - took[-1]))
    return took


async def measure(options: argparse.Namespace) -> None:
    """Load for a while, switch every few seconds for a while, and report."""
    work = Work(
        "ours", str(options.model), options.groups, new_tokens=options.tokens, threads=options.threads
    )
    engine = open_engine(work)
    shapes = {name: tensor.shape for name, tensor in engine.shapes.items()}
    factors = work.factors(shapes)
    times = max(1, int(options.seconds / options.every))
    newer = [
        {name: tensor + np.float32(1e-4 * version) for name, tensor in factors.items()}
        for version in range(times + 1)
    ]

    async def ask(number: int) -> str:
        return (await engine.sample(request_of(work, 10**6 + number, 1))).policy

    async def steady(number: int) -> None:
        await ask(number)

    async def switch(version: int) -> None:
        await engine.load_policy(f"policy-{version}", newer[version], newest=True)
        await engine.unload_policy(f"policy-{version - 1}")  # once its last rollout has ended
        assert await ask(version) == f"policy-{version}"

    await engine.load_policy("policy-0", newer[0], newest=True)
    await engine.sample(request_of(work, 10**7, WARM_UP_TOKENS))
    load = Load(engine, work)
    hands = [asyncio.create_task(load.run()) for _ in range(options.groups)]
    await asyncio.sleep(options.seconds / 2)
    before = time.perf_counter()
    steady_s = await every(options.every, times, steady)
    middle = time.perf_counter()
    say(f"steady: {load.tokens_per_s(before, middle):.1f} tokens/s; now a switch every {options.every} s")
    switch_s = await every(options.every, times, switch)
    after = time.perf_counter()
    load.stop = True
    await asyncio.gather(*hands)
    await engine.close()
    speeds = load.tokens_per_s(before, middle), load.tokens_per_s(middle, after)
    report(
        {
            "groups": options.groups,
            "switches": times,
            "tokens_per_s_before": speeds[0],
            "tokens_per_s_switching": speeds[1],
            "first_token_s_before": median(steady_s),
            "first_token_s_switching": median(switch_s),
            "first_token_s_switching_max": max(switch_s),
        },
        [
            Goal("speed_kept", speeds[1] / speeds[0], at_least=SPEED_KEPT),
            Goal(
                "first_token_beyond_prefill_and_step_s",
                median(switch_s) - median(steady_s),
                at_most=REACTION_S,
            ),
        ],
    )


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL, help="make it with examples/smollm2.py")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="of either half")
    parser.add_argument("--every", type=float, default=5.0, help="seconds from switch to switch")
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
