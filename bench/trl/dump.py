"""Records what TRL's GRPOTrainer does on a tiny model, for our learner to replay.

    python -m venv trl-venv && trl-venv/bin/pip install -r bench/trl/requirements.txt
    trl-venv/bin/python -m bench.trl.dump tests/golden

A Llama of two layers with random weights samples its own completions and trains a LoRA adapter on them for a
few optimizer steps, under each of ``RECORDINGS``. ``trl_replay.json`` holds settings and numbers,
``trl_replay.safetensors`` the model, what each step trained on, and the adapter before the first step and
after every one, with AdamW's first moments. ``tests/roles/learner/test_trl_replay.py`` replays them. Runs in
TRL's environment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from peft import LoraConfig
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # has an environment of its own

VOCABULARY, PAD, BOS, EOS = 32, 0, 1, 2
STEPS, GENERATIONS, ROWS, COMPLETION_TOKENS = 4, 8, 16, 12
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}

MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
"""Wide initial weights, so that its distribution is far from flat."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Settings of one run in TRL's words; what is not named is TRL's default."""

    settings: dict[str, Any]
    micro_batch_rows: int


RECORDINGS = {
    "default": Recording({}, micro_batch_rows=4),
    "grpo_off_policy": Recording(
        {
            "loss_type": "grpo",
            "num_iterations": 2,
            "epsilon": 0.1,
            "epsilon_high": 0.15,
            "delta": 1.2,
            "beta": 0.05,
            "max_grad_norm": 0.1,
        },
        micro_batch_rows=8,
    ),
    "dr_grpo_off_policy": Recording(
        {
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "num_iterations": 4,
            "epsilon": 0.05,
            "beta": 0.1,
            "use_bias_correction_kl": False,
            "adam_beta2": 0.99,
            "weight_decay": 0.1,
            "lr_scheduler_type": "constant",
        },
        micro_batch_rows=2,
    ),
}

REPORTED = (
    "loss_type",
    "num_iterations",
    "epsilon",
    "epsilon_high",
    "delta",
    "beta",
    "use_bias_correction_kl",
    "scale_rewards",
    "importance_sampling_level",
    "max_completion_length",
    "temperature",
    "learning_rate",
    "lr_scheduler_type",
    "max_steps",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
    "gradient_accumulation_steps",
    "steps_per_generation",
)
"""Settings that the replay may need, as the trainer has them in the end."""

Arrays = dict[str, NDArray[Any]]


class Recorder(GRPOTrainer):  # type: ignore[misc]  # Any where TRL is not installed
    """GRPOTrainer that notes every micro-batch: what went in, the loss, TRL's metrics for it."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.micro_batches: list[tuple[Arrays, dict[str, Any]]] = []
        self.groups: list[dict[str, Any]] = []

    def _get_per_token_logps_and_entropies(self, *positional: Any, **named: Any) -> Any:
        self.scored = super()._get_per_token_logps_and_entropies(*positional, **named)
        return self.scored

    def _calculate_rewards(self, *positional: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*positional)
        self.groups.append({"rewards": rewards[:, 0].tolist()})
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        scored: dict[str, torch.Tensor] = super()._generate_and_score_completions(inputs)
        self.groups[-1]["advantages"] = scored["advantages"].tolist()
        return scored

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        old = inputs.get("old_per_token_logps")
        own = self.scored[0].detach()
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        arrays = {name: inputs[name].numpy() for name in names}
        arrays["old_logprobs"] = (own if old is None else old).numpy()
        metrics = {
            name: values[-1]
            for name, values in self._metrics["train"].items()
            if name in {"kl", "entropy"} or name.startswith("clip_ratio/")
        }
        tokens = int(inputs["completion_mask"].sum())
        self.micro_batches.append(
            (arrays, {"loss": float(loss.detach()), "tokens": tokens, "metrics": metrics})
        )
        return loss


class StepNotes(TrainerCallback):
    """Learning rate before, and adapter after every optimizer step."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []
        self.adapters: list[Arrays] = []
        self.first_moments: list[Arrays] = []

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """The adapter before the first step."""
        self.adapters.append(adapter_of(model))

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """The rate that the step will use."""
        self.learning_rates.append(float(optimizer.param_groups[0]["lr"]))

    def on_step_end(self, *_: Any, model: Any = None, optimizer: Any = None, **__: Any) -> None:
        """The adapter after it, and AdamW's mean of the gradients."""
        self.adapters.append(adapter_of(model))
        factors = factors_of(model).items()
        self.first_moments.append({n: optimizer.state[f]["exp_avg"].numpy().copy() for n, f in factors})


def factors_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """The trainable factors by PEFT tensor name."""
    return {
        name.replace(".default.weight", ".weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def adapter_of(model: Any) -> Arrays:
    """A copy of the factors."""
    return {name: factor.detach().numpy().copy() for name, factor in factors_of(model).items()}


def a_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: ``t3`` is token 3."""
    words = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS} | {f"t{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
    )


def prompts() -> Dataset:
    """Prompts of two to seven tokens."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, VOCABULARY, rng.integers(2, 8)) for _ in range(64)]
    return Dataset.from_list([{"prompt": " ".join(f"t{token}" for token in row)} for row in rows])


def few_high_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 if most tokens are of the lower half: some completions of a group earn it and others do not."""
    return [float(2 * np.sum(np.array(ids) < VOCABULARY // 2) > len(ids)) for ids in completion_ids]


def settings(recording: Recording, output: str) -> GRPOConfig:
    """TRL's defaults but for the size of everything, and a rate at which something happens."""
    return GRPOConfig(
        **{
            "output_dir": output,
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": recording.micro_batch_rows,
            "gradient_accumulation_steps": ROWS // recording.micro_batch_rows,
            "num_generations": GENERATIONS,
            "max_completion_length": COMPLETION_TOKENS,
            "learning_rate": 3e-3,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 7,
        }
        | recording.settings
    )


def record(recording: Recording, model_dir: Path, output: str) -> tuple[Arrays, dict[str, Any]]:
    """Run TRL once; gives tensors and numbers."""
    notes = StepNotes()
    trainer = Recorder(
        model=str(model_dir),
        args=settings(recording, output),
        reward_funcs=few_high_tokens,
        train_dataset=prompts(),
        processing_class=a_tokenizer(),
        callbacks=[notes],
        peft_config=LoraConfig(**LORA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    arrays: Arrays = {f"adapter/0/{name}": value for name, value in notes.adapters[0].items()}
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    parts = ROWS // recording.micro_batch_rows
    steps = []
    for step in range(STEPS):
        chosen = trainer.micro_batches[step * parts : (step + 1) * parts]
        for part, (tensors, _) in enumerate(chosen):
            arrays |= {f"step/{step}/{part}/{name}": tensor for name, tensor in tensors.items()}
        arrays |= {f"adapter/{step + 1}/{name}": value for name, value in notes.adapters[step + 1].items()}
        arrays |= {f"exp_avg/{step + 1}/{name}": value for name, value in notes.first_moments[step].items()}
        parts_of_step = [numbers for _, numbers in chosen]
        rate = notes.learning_rates[step]
        steps.append({"grad_norm": norms[step], "learning_rate": rate, "micro_batches": parts_of_step})
    used = {name: getattr(trainer.args, name) for name in REPORTED}
    return arrays, {"settings": used, "steps": steps, "groups": trainer.groups}


def main() -> None:
    """Record everything into the directory that is named."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    tensors = {f"model/{name}": value.numpy().copy() for name, value in model.state_dict().items()}
    numbers: dict[str, Any] = {"lora": LORA, "model": MODEL, "recordings": {}}
    with tempfile.TemporaryDirectory() as work:
        model.save_pretrained(work)
        for name, recording in RECORDINGS.items():
            arrays, numbers["recordings"][name] = record(recording, Path(work), f"{work}/{name}")
            tensors |= {f"{name}/{key}": value for key, value in arrays.items()}
    save_file(tensors, directory / "trl_replay.safetensors")
    (directory / "trl_replay.json").write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
