"""Arm: transformers' own continuous batching, every rollout a request."""

from __future__ import annotations

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.sampling.plain import plain_model
from bench.sampling.work import WARM_UP_TOKENS, Stopwatch, work_of_this_process

PAGE_TOKENS = 32


def main() -> None:
    """Sample and report."""
    work = work_of_this_process()
    model = plain_model(work)
    requests = work.groups * work.rows
    pages = -(-(work.prompt_tokens + work.new_tokens) // PAGE_TOKENS)
    settings = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=requests * pages + 8,
        max_batch_tokens=1024,
        max_requests_per_batch=requests,
        return_logprobs=True,
        use_cuda_graph=False,
    )

    def sample(inputs: list[list[int]], new_tokens: int) -> list[tuple[int, float]]:
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            eos_token_id=work.eos_ids(),
            pad_token_id=0,
        )
        out = model.generate_batch(inputs, generation_config=config, continuous_batching_config=settings)
        outputs = sorted(out.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        if faults := [output.error for output in outputs if output.error]:
            raise SystemExit(f"continuous batching failed: {faults[0]}")
        return [(len(output.generated_tokens), output.lifespan[1]) for output in outputs]

    prompts = [prompt.tolist() for prompt in work.prompts() for _ in range(work.rows)]
    with torch.inference_mode():
        sample(prompts[: work.rows], WARM_UP_TOKENS)
        watch = Stopwatch(work)
        done = sample(prompts, work.new_tokens)
    ends = [max(end for _, end in done[g * work.rows : (g + 1) * work.rows]) for g in range(work.groups)]
    watch.report([length for length, _ in done], ends)


if __name__ == "__main__":
    main()
