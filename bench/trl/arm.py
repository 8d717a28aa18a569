"""TRL's training step, as an arm of ``bench.learner``: GRPOTrainer 1.16 with the same batch put into it.

Runs in TRL's environment (``bench/trl/README.md``). Sampling is replaced and costs nothing; what is timed is
what the trainer does from the begin of an optimizer step to its end: forward and backward of every
micro-batch, clipping, AdamW.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # has an environment of its own

from bench.steps.arm import (
    WARM_UP_TOKENS,
    ArmResult,
    arguments,
    forget_peak,
    held_bytes,
    peak_bytes,
)
from bench.steps.batch import ALPHA, CLIP, RANK, TRAINED_RATE, StepBatch
from bench.trl.dump import a_tokenizer, factors_of

GENERATIONS = 8


class InjectedTrainer(GRPOTrainer):  # type: ignore[misc]  # Any where TRL is not installed
    """Trains on given batches: the first is cut to a few tokens and warms up."""

    def give(self, batch: StepBatch) -> None:
        """Train on ``batch``."""
        self.given, self.calls, self.losses = batch, 0, list[float]()

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:  # noqa: ARG002
        batch, warm_up = self.given, self.calls == 0
        self.calls += 1
        prompt, completion = (WARM_UP_TOKENS,) * 2 if warm_up else (None, None)
        mask = torch.from_numpy(batch.mask[:, :completion]).long()
        prompts = torch.from_numpy(batch.prompts[:, :prompt])
        return {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": torch.from_numpy(batch.completions[:, :completion]),
            "completion_mask": mask,
            "advantages": torch.from_numpy(batch.advantages),
            "old_per_token_logps": torch.from_numpy(batch.logprobs[:, :completion]),
            "num_items_in_batch": mask.sum(),
        }

    def training_step(self, *positional: Any, **named: Any) -> torch.Tensor:
        """TRL's, with a note of the loss: the log rounds it."""
        loss: torch.Tensor = super().training_step(*positional, **named)
        self.losses.append(float(loss))
        return loss


class Clock(TrainerCallback):
    """Times optimizer steps; the first one warms up."""

    def __init__(self, result: ArmResult) -> None:
        self.result, self.started, self.cpu_started = result, 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Start, and forget what came before the first measured step."""
        if state.global_step == 1:
            forget_peak()
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Stop."""
        if state.global_step > 1:
            self.result.step_s.append(time.perf_counter() - self.started)
            self.result.cpu_s.append(time.process_time() - self.cpu_started)
            self.result.peak_bytes = peak_bytes()


def settings(options: Any, rows: int, output: str) -> GRPOConfig:
    """TRL's defaults but for what a CPU and a fixed batch need."""
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=options.checkpointing,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=options.size,
        gradient_accumulation_steps=rows // options.size,
        num_generations=GENERATIONS,
        loss_type="dapo",
        epsilon=CLIP,
        learning_rate=TRAINED_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=1 + options.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def open_trainer(options: Any, batch: StepBatch, output: str, result: ArmResult) -> InjectedTrainer:
    """A trainer that holds the batch's adapter, its weights touched."""
    rows = int(batch.lengths.size)
    trainer = InjectedTrainer(
        model=str(options.model),
        args=settings(options, rows, output),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "-"}] * rows),
        processing_class=a_tokenizer(),
        callbacks=[Clock(result)],
        peft_config=LoraConfig(
            r=RANK,
            lora_alpha=int(ALPHA),
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    )
    with torch.no_grad():
        for name, factor in factors_of(trainer.model).items():
            factor.copy_(torch.from_numpy(batch.factors[name]))
        for parameter in trainer.model.parameters():
            parameter.sum()
    trainer.give(batch)
    return trainer


def main() -> None:
    """Load, warm up, measure."""
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    batch = StepBatch.load(options.batch)
    lean = ", checkpointing" if options.checkpointing else ""
    result = ArmResult("trl", f"{options.size} rows a micro-batch{lean}")
    with tempfile.TemporaryDirectory() as output:
        trainer = open_trainer(options, batch, output, result)
        result.loaded_bytes = held_bytes()
        trainer.train()
    parts = batch.lengths.size // options.size
    result.loss = [sum(trainer.losses[i * parts : (i + 1) * parts]) for i in range(1, 1 + options.steps)]
    result.grad_norm = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry][1:]
    result.print()


if __name__ == "__main__":
    main()
