"""What does a switch of policy cost a sampler under load, and how soon is the new policy sampled from?"""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import count
from statistics import mean

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
"""Time to the first token under a new policy beyond one prefill and one step of decoding."""


class Load:
    """So many groups in hand at any time; counts their tokens as the steps of the engine produce them."""

    def __init__(self, engine: TransformersEngine, work: Work) -> None:
        self._engine, self._work = engine, work
        self._numbers = count()
        self.ended: list[tuple[float, int, str]] = []
        """When each group was whole, its tokens, and its policy."""
        self.stop = False

    async def run(self) -> None:
        """Keep a group in hand, one after the other."""
        while not self.stop:
            number = next(self._numbers)
            sampled = await self._engine.sample(request_of(self._work, number))
            tokens = sum(len(rollout.token_ids) for rollout in sampled.rollouts)
            self.ended.append((time.perf_counter(), tokens, sampled.policy))

    def tokens_per_s(self, start: float, end: float) -> float:
        """Of groups that became whole in a stretch of time."""
        return sum(tokens for at, tokens, _ in self.ended if start <= at < end) / (end - start)


def request_of(work: Work, number: int, new_tokens: int | None = None) -> SampleRequest:
    """Another prompt for every number."""
    prompt = np.random.default_rng(number).integers(3, work.vocab_size, work.prompt_tokens, np.int32)
    params = SamplingParams(max_new_tokens=new_tokens or work.new_tokens)
    return SampleRequest(prompt, work.rows, params, number, None, deadline_s=3600.0)


async def measure(options: argparse.Namespace) -> None:
    """Load for a while, switch every few seconds for a while, and report."""
    work = Work(
        "ours", str(options.model), options.groups, new_tokens=options.tokens, threads=options.threads
    )
    engine = open_engine(work)
    shapes = {name: tensor.shape for name, tensor in engine.shapes.items()}
    factors = work.factors(shapes)
    await engine.load_policy("policy-0", factors, newest=True)
    await engine.sample(request_of(work, 10**6, WARM_UP_TOKENS))
    load = Load(engine, work)
    hands = [asyncio.create_task(load.run()) for _ in range(options.groups)]
    await asyncio.sleep(options.seconds / 2)
    before = time.perf_counter()
    await asyncio.sleep(options.seconds)
    middle = time.perf_counter()
    say(f"steady: {load.tokens_per_s(before, middle):.1f} tokens/s; now a switch every {options.every} s")
    loads_ms, firsts_s = [], []
    for version in range(1, 1 + max(1, int(options.seconds / options.every))):
        begun = time.perf_counter()
        newer = {name: tensor + np.float32(1e-4 * version) for name, tensor in factors.items()}
        announced = time.perf_counter()
        await engine.load_policy(f"policy-{version}", newer, newest=True)
        loads_ms.append((time.perf_counter() - announced) * 1e3)
        first = await engine.sample(request_of(work, 10**6 + version, 1))
        assert first.policy == f"policy-{version}"
        firsts_s.append(time.perf_counter() - announced)
        await engine.unload_policy(f"policy-{version - 1}")
        await asyncio.sleep(max(0.0, options.every - (time.perf_counter() - begun)))
    after = time.perf_counter()
    load.stop = True
    await asyncio.gather(*hands)
    alone = await time_alone(engine, work)
    await engine.close()
    kept = load.tokens_per_s(middle, after) / load.tokens_per_s(before, middle)
    reaction = min(firsts_s) - alone
    report(
        {
            "groups": options.groups,
            "tokens_per_s_before": load.tokens_per_s(before, middle),
            "tokens_per_s_switching": load.tokens_per_s(middle, after),
            "switches": len(loads_ms),
            "load_policy_ms": mean(loads_ms),
            "first_token_s": min(firsts_s),
            "first_token_mean_s": mean(firsts_s),
            "prefill_and_step_s": alone,
        },
        [
            Goal("speed_kept", kept, at_least=SPEED_KEPT),
            Goal("first_token_beyond_prefill_and_step_s", reaction, at_most=REACTION_S),
        ],
    )


async def time_alone(engine: TransformersEngine, work: Work) -> float:
    """Seconds from a request to its first token while a batch decodes: prefill and one step."""
    hands = [
        asyncio.create_task(engine.sample(request_of(work, 10**7 + number))) for number in range(work.groups)
    ]
    await asyncio.sleep(2.0)
    times = []
    for number in range(3):
        start = time.perf_counter()
        await engine.sample(request_of(work, 10**8 + number, 1))
        times.append(time.perf_counter() - start)
    await asyncio.gather(*hands)
    return mean(times)


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
