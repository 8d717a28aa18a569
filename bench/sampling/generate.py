"""Arm: ``model.generate`` of transformers, one group after the other."""

from __future__ import annotations

import time

import torch
from transformers import GenerationConfig

from bench.sampling.plain import plain_model
from bench.sampling.work import WARM_UP_TOKENS, Stopwatch, work_of_this_process


def main() -> None:
    """Sample and report."""
    work = work_of_this_process()
    model = plain_model(work)
    eos = torch.tensor(work.eos_ids())

    def sample(prompt: torch.Tensor, new_tokens: int) -> list[int]:
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            num_return_sequences=work.rows,
            eos_token_id=work.eos_ids(),
            pad_token_id=0,
        )
        out = model.generate(
            prompt[None], generation_config=config, attention_mask=torch.ones_like(prompt[None])
        )
        completions = out[:, len(prompt) :]
        ends = torch.isin(completions, eos)
        length = completions.shape[1]
        return [int(row.nonzero()[0]) + 1 if row.any() else length for row in ends]

    prompts = torch.from_numpy(work.prompts().astype("int64"))
    with torch.inference_mode():
        sample(prompts[0], WARM_UP_TOKENS)
        watch, lengths, ends = Stopwatch(work), [], []
        for prompt in prompts:
            lengths += sample(prompt, work.new_tokens)
            ends.append(time.perf_counter())
    watch.report(lengths, ends)


if __name__ == "__main__":
    main()
