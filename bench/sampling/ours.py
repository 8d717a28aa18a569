"""Arm: the transformers engine of this project, all groups offered at once."""

from __future__ import annotations

import asyncio
import time

import structlog

from bench.sampling.work import ALPHA, WARM_UP_TOKENS, Stopwatch, Work, work_of_this_process
from protocol.messages import SamplingParams
from protocol.runspec import LoraSpec
from roles.sampler.engine import SampleRequest
from roles.sampler.transformers_engine import TransformersEngine


def open_engine(work: Work) -> TransformersEngine:
    """The engine, as a node opens it."""
    return TransformersEngine.open(
        work.directory,
        LoraSpec(rank=work.rank, alpha=ALPHA),
        work.eos_ids(),
        device="cpu",
        dtype="float32",
        rows_max=128,
        groups_per_batch=None,
        threads=work.threads,
    )


def requests(work: Work, new_tokens: int, seed: int = 0) -> list[SampleRequest]:
    """One for each group."""
    params = SamplingParams(max_new_tokens=new_tokens)
    return [
        SampleRequest(prompt, work.rows, params, number, None, deadline_s=3600.0)
        for number, prompt in enumerate(work.prompts(seed))
    ]


async def measure(work: Work) -> None:
    """Sample and report."""
    engine = open_engine(work)
    shapes = {name: tensor.shape for name, tensor in engine.shapes.items()}
    await engine.load_policy("policy-1", work.factors(shapes), newest=True)
    await engine.sample(requests(work, WARM_UP_TOKENS, seed=9)[0])
    ends: list[float] = []

    async def timed(request: SampleRequest) -> list[int]:
        sampled = await engine.sample(request)
        ends.append(time.perf_counter())
        return [len(rollout.token_ids) for rollout in sampled.rollouts]

    watch = Stopwatch(work)
    lengths = await asyncio.gather(*(timed(request) for request in requests(work, work.new_tokens)))
    watch.report([length for group in lengths for length in group], ends)
    await engine.close()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    asyncio.run(measure(work_of_this_process()))
