"""The RunSpec: the frozen settings that all peers of a run share, one small class a concern.

A run is one TOML file with these tables. Unknown keys are refused; the defaults are the good run.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from protocol.arguments import Arguments
from protocol.audit_spec import AuditSpec
from protocol.errors import OperatorError, one_line
from protocol.learner_spec import LearnerSpec
from protocol.limits import (
    COMPLETION_TOKENS_MAX,
    GROUP_SIZE_MAX,
    PROMPT_TOKENS_MAX,
    TASK_ROWS_MAX,
)
from protocol.presets import UnknownPreset, with_numbers
from protocol.spec import Count, CountOrZero, Name, NonNegative, Positive, Seed, Spec, first_fault
from protocol.store_spec import StoreSpec
from protocol.tools_spec import ToolsSpec
from protocol.user_spec import UserSpec

Modules = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]

ENVIRONMENT_PREFIX = "verifiers:"


class ModelSpec(Spec):
    """The frozen base model."""

    ref: str
    """``builtin:tiny`` (or ``builtin:tiny-7``, made from seed 7), a local directory, or a model id on the
    Hugging Face Hub. An exported adapter names its base model by this, so it says everything."""
    revision: str | None = None
    """Commit of a hub model; ``create`` pins the newest one when absent."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    bits: Literal[4, 8] | None = None
    """Hold the weights of linear layers in so many bits (bitsandbytes: the ``quantized`` extra), on all
    peers: base and adapter are one policy. 8 rounds activations, too, by what is computed together: the
    importance ratio of fresh groups is then only near 1 (docs/adr/0013), so prefer 4."""
    config_digest: str | None = None
    tokenizer_digest: str | None = None
    """sha256 of config and tokenizer as ``create`` saw them; a node whose copies differ does not join."""


class LoraSpec(Spec):
    """The shape of every adapter of the run (Hu et al. 2021; rsLoRA: Kalajdzievski 2023)."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    alpha: Positive = 32.0
    rslora: bool = False
    target_modules: Literal["all-linear"] | Modules = "all-linear"

    @model_validator(mode="before")
    @classmethod
    def _has_no_dropout(cls, data: Any) -> Any:
        if isinstance(data, dict) and (data.get("dropout") or data.get("lora_dropout")):
            raise ValueError(
                "dropout is not supported: the learner would score tokens under another policy than the one "
                "that sampled them, and the importance ratio of fresh groups would not be 1"
            )
        return data

    @property
    def scale(self) -> float:
        """What B·A is multiplied with: alpha/r, or alpha/sqrt(r) for rsLoRA."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class TasksSpec(Spec):
    """Where prompts and answers come from."""

    source: str
    """``builtin:sort-digits``, a ``.jsonl`` file, ``hf:<dataset>[/<config>][@<revision>]`` (or ``hf:`` and a
    local path), ``reasoning-gym:<dataset>[,…]`` or ``verifiers:<environment>``."""
    split: str = "train"
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    answer_after: str | None = None
    """Text after whose last occurrence the answer stands in its column, such as GSM8K's ``####``."""
    template: str | None = None
    """Python format text with ``{prompt}``; absent means the tokenizer's chat template."""
    system_prompt: str | None = None
    rows_max: Annotated[int, Field(ge=1, le=TASK_ROWS_MAX)] | None = None
    held_out: CountOrZero = 128
    """Rows kept for evaluation and never trained on."""
    prompt_tokens_max: Annotated[int, Field(ge=1, le=PROMPT_TOKENS_MAX)] = 1024
    strict: bool = False
    """Refuse to start on the first bad row instead of skipping and counting it."""
    arguments: Annotated[Arguments, Field(exclude_if=lambda table: not table)] = {}
    """``[tasks.arguments]``: a ``verifiers:`` environment's own settings, for its tasks and its rewards alike
    (docs/environments.md)."""
    digest: str | None = None
    """sha256 over all rows as ``create`` read them; a node whose rows differ does not join."""

    @model_validator(mode="after")
    def _arguments_have_a_taker(self) -> Self:
        if self.arguments and not self.source.startswith(ENVIRONMENT_PREFIX):
            raise ValueError(f"arguments are for a source {ENVIRONMENT_PREFIX}<environment>, and only for it")
        return self


class RewardSpec(Spec):
    """One reward function and its weight."""

    name: Annotated[str, Field(min_length=1)]
    """One of docs/rewards.md, such as ``math`` or ``verifiers:<environment>``, or ``module:function``."""
    weight: float = 1.0
    timeout_s: Positive = 5.0
    memory_bytes_max: Count = 2 << 30


class SamplingSpec(Spec):
    """How tasks are sampled. Train at temperature 1 without truncation, or the ratio is biased."""

    group_size: Annotated[int, Field(ge=2, le=GROUP_SIZE_MAX)] = 8
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """0 means all tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_new_tokens: Annotated[int, Field(ge=1, le=COMPLETION_TOKENS_MAX)] = 512
    deadline_s: Positive = 600.0
    """A group that is not whole by then is published with what is finished."""
    ack_wait_s: Positive = 30.0
    """How long the broker waits for a sign of life before it gives a task to somebody else."""
    deliveries_max: Count = 5
    """A message delivered more often goes to the dead-letter subject."""


class AdvantageSpec(Spec):
    """How rewards become advantages."""

    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted: the group's mean reward, or the mean of the others (RLOO, arXiv 2402.14740)."""
    advantage_scale: Literal["none", "std"] = "none"
    """``none``: Dr. GRPO (arXiv 2503.20783); ``std``: divided by the group's deviation (GRPO, arXiv
    2402.03300)."""
    advantage_ddof: Literal[0, 1] = 1
    """1: the deviation of a sample (n-1); 0: of a population, as TRL's asynchronous trainer has it."""
    advantage_epsilon: Positive = 1e-4
    """Added to the deviation."""


class LossSpec(AdvantageSpec):
    """The GRPO objective as numbers; every published variant is a point in this space.

    A run file may begin with a named point: ``preset = "gspo"`` (``protocol/presets.py``).
    """

    ratio_level: Literal["token", "sequence"] = "token"
    """``sequence``: GSPO (arXiv 2507.18071)."""
    clip_low: NonNegative = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: Positive | None = None
    """Upper bound of the ratio where the advantage is negative (arXiv 1912.09729)."""
    detached_weight: bool = False
    """CISPO (arXiv 2506.13585): the clipped ratio is a constant weight of log pi."""
    correction: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask", "negative_mask"] = (
        "none"
    )
    """What weighs the loss for off-policy tokens: a token's (or its sequence's) weight truncated at the cap
    (TIS), masked outside [1/cap, cap] (IcePop), a sequence masked above the cap, or only a sequence of
    negative advantage whose mean log(sampler/learner) exceeds log(cap) (DeepSeek-V3.2)."""
    correction_cap: Positive = 2.0
    kl_beta: NonNegative = 0.0
    """Weight of k3 against genesis."""
    kl_unbiased: bool = False
    """k3 times the ratio, whose gradient is unbiased off policy (DeepSeek-V3.2, arXiv 2512.02556)."""
    entropy_coef: NonNegative = 0.0
    aggregation: Literal["token", "sequence", "constant"] = "token"
    aggregation_tokens: Count | None = None
    """Divisor per completion for ``constant`` (the maximum completion length in Dr. GRPO)."""
    mask_truncated: bool = False
    log_ratio_max: Positive = 20.0
    """Log-ratios are capped here before ``exp``, and counted."""

    @model_validator(mode="after")
    def _constant_needs_length(self) -> Self:
        if (self.aggregation == "constant") != (self.aggregation_tokens is not None):
            raise ValueError("aggregation_tokens belongs to aggregation = 'constant', and only to it")
        return self


class StalenessSpec(Spec):
    """How far behind the learner a group may have started."""

    max_staleness: CountOrZero = 4
    causal: bool = True
    """Train only on groups whose clock the learner contains. Off is for measurements (``bench.learners``)."""


class EvalSpec(Spec):
    """Evaluation on held-out problems, pinned to one clock."""

    every: CountOrZero = 25
    """Updates between evaluations; 0 means only before the first and after the last."""
    problems: CountOrZero = 128
    completions_per_problem: Annotated[int, Field(ge=1, le=GROUP_SIZE_MAX)] = 1
    temperature: Positive = 1.0


class RunSpec(Spec):
    """Everything that all peers of a run must agree on."""

    name: Name
    seed: Seed = 0
    model: ModelSpec
    lora: LoraSpec = LoraSpec()
    tasks: TasksSpec
    rewards: Annotated[tuple[RewardSpec, ...], Field(strict=False, min_length=1)]
    sampling: SamplingSpec = SamplingSpec()
    learner: LearnerSpec = LearnerSpec()
    loss: LossSpec = LossSpec()
    staleness: StalenessSpec = StalenessSpec()
    store: StoreSpec
    eval: EvalSpec = EvalSpec()
    audit: AuditSpec = AuditSpec()
    tools: Annotated[ToolsSpec | None, Field(exclude_if=lambda tools: tools is None)] = None
    user: Annotated[UserSpec | None, Field(exclude_if=lambda user: user is None)] = None

    @model_validator(mode="after")
    def _rewards_are_distinct(self) -> Self:
        if len({reward.name for reward in self.rewards}) != len(self.rewards):
            raise ValueError("each reward may be listed once")
        return self

    @model_validator(mode="after")
    def _an_environment_scores_its_own_tasks(self) -> Self:
        for reward in self.rewards:
            if reward.name.startswith(ENVIRONMENT_PREFIX) and reward.name != self.tasks.source:
                raise ValueError(
                    f"reward {reward.name} scores tasks of its own environment only, so tasks.source must be "
                    f"the same text; it is {self.tasks.source}"
                )
        return self

    @model_validator(mode="after")
    def _user_fits_the_tasks(self) -> Self:
        if self.user is None:
            return self
        if self.tasks.template is not None:
            raise ValueError("the chat template frames what the user says: leave tasks.template out")
        if self.tasks.answer_column in self.user.columns:
            raise ValueError(
                f"user.columns names {self.tasks.answer_column!r}, the answers: samplers never see them"
            )
        return self

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON; peers that print the same digest share the same settings."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @classmethod
    def from_toml(cls, text: str, origin: str) -> RunSpec:
        """Parse a run file; raises OperatorError with one line that names the key and the fault."""
        try:
            tables = with_numbers(tomllib.loads(text), SamplingSpec.model_fields["max_new_tokens"].default)
            return cls.model_validate(tables)
        except tomllib.TOMLDecodeError as exc:
            raise OperatorError(f"{origin}: not TOML: {exc}") from exc
        except ValidationError as exc:
            raise OperatorError(f"{origin}: {first_fault(exc)}") from exc
        except UnknownPreset as exc:
            raise OperatorError(f"{origin}: {one_line(str(exc))}") from exc
