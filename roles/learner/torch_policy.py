"""The policy that the learner trains: a frozen base model in torch with fp32 LoRA factors.

    samples -> micro-batches -> log-probabilities -> loss share -> backward, ... -> clip -> AdamW

A step is a function of factors, optimizer state, samples and update number: it draws no random numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog
import torch
from peft import PeftModel
from torch import Tensor

from protocol.runspec import RunSpec
from roles.learner.packing import micro_batches
from roles.learner.policy import Sample, State, StepResult
from roles.learner.schedule import learning_rate
from roles.learner.torch_adapter import causal_model, factor_parameters, genesis_factors, open_adapter
from roles.learner.torch_logprobs import PaddedRows, TokenScores, score
from roles.learner.torch_loss import StepTotals, TokenBatch, loss_contribution
from roles.learner.torch_loss_metrics import loss_metrics, ratio_deviation
from roles.learner.torch_optimizer import FactorOptimizer
from roles.policy.compose import Factors, fault

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class StepRecord:
    """What the backward passes of one step leave behind for its metrics."""

    loss: float = 0.0
    batches: list[TokenBatch] = field(default_factory=list)
    on_policy: list[bool] = field(default_factory=list)
    forwarded_tokens: int = 0
    padded_tokens: int = 0
    fwd_s: float = 0.0
    bwd_s: float = 0.0


class TorchPolicy:
    """Implements ``roles.learner.policy.Policy`` on CPU, CUDA or MPS. Not for concurrent use."""

    def __init__(
        self, model: PeftModel, spec: RunSpec, seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        """Train the factors of ``model`` (``open`` makes one); ``seconds`` times the phases of a step."""
        self._model = model
        self._causal = causal_model(model)
        self._spec = spec
        self._seconds = seconds
        self._factors = factor_parameters(model)
        self._device = next(iter(self._factors.values())).device
        self._optimizer = FactorOptimizer(self._factors, spec.learner)
        self.load(self.genesis(spec.seed))

    @classmethod
    def open(cls, model_dir: Path, spec: RunSpec, device: str = "cpu") -> TorchPolicy:
        """Load the base model of ``spec`` from a local directory. Raises OperatorError if that fails."""
        return cls(open_adapter(model_dir, spec.model, spec.lora, torch.device(device)), spec)

    def genesis(self, seed: int) -> Factors:
        """Fresh factors for ``seed``, the same bytes on every machine; the policy itself is unchanged."""
        return genesis_factors({name: tuple(tensor.shape) for name, tensor in self._factors.items()}, seed)

    def load(self, factors: Factors) -> None:
        """Set the factors and keep the optimizer's moments.

        Raises ValueError before a single number is copied unless names, shapes and dtypes are this run's
        and every number is finite.
        """
        if reason := fault(factors, self.factors()):
            raise ValueError(f"not an adapter of this run: {reason}")
        with torch.no_grad():
            for name, parameter in self._factors.items():
                parameter.copy_(torch.from_numpy(np.array(factors[name])))

    def factors(self) -> Factors:
        """A copy of the current factors, fp32."""
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in self._factors.items()}

    def state(self) -> State:
        """A copy of Adam's moments and step counts; a step depends on nothing else but factors and input."""
        return self._optimizer.state()

    def restore(self, state: State) -> None:
        """Return to a saved state. Raises ValueError if it belongs to other factors."""
        self._optimizer.restore(state)

    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        """One optimizer step over all ``samples``; ``update`` (from 0) sets the learning rate.

        A step without anything to train on, or whose gradient is not finite, changes nothing at all.
        Raises ValueError on a sample whose ids and log-probabilities differ in number.
        """
        counted, trained = self._divide(samples)
        totals = StepTotals(sum(len(s.token_ids) for s in counted), len(counted))
        rate = learning_rate(self._spec.learner, update)
        metrics = {"learning_rate": rate, "batch/samples_per_step": float(len(samples))}
        if not trained:
            return StepResult(updated=False, metrics=metrics | {"step/skipped_empty_total": 1.0})
        record = self._accumulate(trained, totals)
        started = self._now()
        # A NaN in the loss need not reach the gradient: clamp gives it none. It is a fault all the same.
        grad_norm = self._optimizer.step(rate) if math.isfinite(record.loss) else None
        metrics |= self._metrics(record) | {"perf/optimizer_s": self._now() - started}
        self._optimizer.zero_gradients()
        if grad_norm is None:
            log.warning("gradient_not_finite", update=update)
            finite = {name: value for name, value in metrics.items() if np.isfinite(value)}
            return StepResult(updated=False, metrics=finite | {"step/skipped_nonfinite_total": 1.0})
        return StepResult(updated=True, metrics=metrics | {"grad_norm": grad_norm})

    def _divide(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
        """Samples that the loss divides by, and those of them that can have a gradient."""
        for sample in samples:
            if len(sample.token_ids) != len(sample.sampler_logprobs):
                raise ValueError(
                    f"{len(sample.token_ids)} tokens with {len(sample.sampler_logprobs)} log-probabilities"
                )
        loss = self._spec.loss
        counted = [s for s in samples if len(s.token_ids) and not (loss.mask_truncated and s.truncated)]
        all_teach = loss.kl_beta > 0 or loss.entropy_coef > 0
        teaching = [s for s in counted if s.advantage != 0]
        return counted, counted if all_teach else teaching

    def _accumulate(self, trained: Sequence[Sample], totals: StepTotals) -> StepRecord:
        """The gradient of the whole step, one micro-batch after the other."""
        self._optimizer.zero_gradients()
        record = StepRecord()
        lengths = [len(s.prompt_token_ids) + len(s.token_ids) for s in trained]
        for indices in micro_batches(lengths, self._spec.learner.micro_batch_tokens):
            self._backward([trained[i] for i in indices], totals, record)
        return record

    def _backward(self, samples: Sequence[Sample], totals: StepTotals, record: StepRecord) -> None:
        """Add one micro-batch's gradient, and what it was to ``record``."""
        started = self._now()
        batch = self._forward(samples, record)
        loss = loss_contribution(batch, self._spec.loss, totals)
        forwarded = self._now()
        loss.backward()
        record.loss += float(loss.detach())
        record.batches.append(batch.detached())
        record.on_policy += [sample.on_policy for sample in samples]
        record.fwd_s += forwarded - started
        record.bwd_s += self._now() - forwarded

    def _forward(self, samples: Sequence[Sample], record: StepRecord) -> TokenBatch:
        rows = PaddedRows.of(samples, self._device)
        record.padded_tokens += rows.token_ids.numel()
        record.forwarded_tokens += sum(len(s.prompt_token_ids) + len(s.token_ids) for s in samples)
        scores = score(self._causal, rows, entropy_gradient=self._spec.loss.entropy_coef > 0)
        return TokenBatch(
            learner_logprobs=scores.logprobs,
            sampler_logprobs=self._tensor(np.concatenate([s.sampler_logprobs for s in samples])),
            rows=rows.rows,
            advantages=self._tensor(np.array([s.advantage for s in samples])),
            entropy=scores.entropy,
            genesis_logprobs=self._genesis_scores(rows).logprobs if self._spec.loss.kl_beta > 0 else None,
        )

    def _genesis_scores(self, rows: PaddedRows) -> TokenScores:
        """Genesis has B = 0, so it is the model without its adapter."""
        with torch.no_grad(), self._model.disable_adapter():
            return score(self._causal, rows)

    def _metrics(self, record: StepRecord) -> dict[str, float]:
        step = TokenBatch.joined(record.batches)
        metrics = loss_metrics(step, self._spec.loss) | {
            "loss": record.loss,
            "batch/microbatches_per_step": float(len(record.batches)),
            "batch/trained_tokens_per_step": float(step.rows.numel()),
            "batch/forwarded_tokens_per_step": float(record.forwarded_tokens),
            "batch/pad_frac": 1 - record.forwarded_tokens / record.padded_tokens,
            "perf/fwd_s": record.fwd_s,
            "perf/bwd_s": record.bwd_s,
        }
        on_policy = torch.tensor(record.on_policy, device=self._device)
        deviation = ratio_deviation(step, on_policy, self._spec.loss)
        return metrics if deviation is None else metrics | {"ratio_max_dev_on_policy": deviation}

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self._device)

    def _now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._seconds()
