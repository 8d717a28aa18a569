"""Our learner's step, as an arm of ``bench.learner``: ``TorchPolicy.step`` and nothing around it."""

from __future__ import annotations

import torch

from bench.steps.arm import ArmResult, arguments, forget_peak, held_bytes, measure
from bench.steps.batch import ALPHA, CLIP, RANK, TRAINED_RATE, StepBatch
from bench.steps.plain import tiny
from protocol.runspec import RunSpec
from roles.learner.policy import Sample
from roles.learner.torch_policy import TorchPolicy


def a_spec(micro_batch_tokens: int) -> RunSpec:
    """The objective of the bench in our words: clipped surrogate, token mean, no KL."""
    return RunSpec.model_validate(
        {
            "name": "bench",
            "model": {"ref": "local"},
            "lora": {"rank": RANK, "alpha": ALPHA},
            "tasks": {"source": "builtin:sort-digits"},
            "rewards": [{"name": "exact"}],
            "learner": {
                "learning_rate": TRAINED_RATE,
                "beta2": 0.999,
                "grad_norm_max": 1.0,
                "micro_batch_tokens": micro_batch_tokens,
            },
            "loss": {"clip_low": CLIP, "clip_high": CLIP, "aggregation": "token"},
            "store": {"url": "file:///nowhere"},
        }
    )


def samples_of(batch: StepBatch) -> list[Sample]:
    """The batch's rows."""
    return [
        Sample(
            prompt_token_ids=batch.prompts[row],
            token_ids=batch.completions[row, :length],
            sampler_logprobs=batch.logprobs[row, :length],
            advantage=float(batch.advantages[row]),
            truncated=False,
            temperature=1.0,
        )
        for row, length in enumerate(batch.lengths.tolist())
    ]


def main() -> None:
    """Load, warm up, measure."""
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    batch = StepBatch.load(options.batch)
    policy = TorchPolicy.open(options.model, a_spec(options.size))
    policy.load(batch.factors)
    for parameter in policy._model.parameters():  # noqa: SLF001  # touched, so that loaded means resident
        parameter.detach().sum()
    result = ArmResult("ours", f"{options.size} tokens a micro-batch", loaded_bytes=held_bytes())
    policy.step(samples_of(tiny(batch)), 0)
    samples = samples_of(batch)
    forget_peak()

    def step() -> tuple[float, float]:
        metrics = policy.step(samples, 0).metrics
        return metrics["loss"], metrics["grad_norm"]

    measure(result, step, options.steps)
    if options.profile:
        from bench.steps.ceiling import profile_of

        result.profile = profile_of(policy._model, batch, step)  # noqa: SLF001  # to count its weights
    result.print()


if __name__ == "__main__":
    main()
