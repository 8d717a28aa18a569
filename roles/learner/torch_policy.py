"""The policy that the learner trains: a frozen base model in torch with fp32 LoRA factors.

    samples -> packed rows -> log-probabilities -> loss share -> backward, ... -> clip -> AdamW

A step is a function of factors, optimizer state, samples and update number: it draws no random numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog
import torch
from peft import PeftModel
from torch import Tensor

from protocol.runspec import RunSpec
from roles.learner.policy import Sample, State, StepResult, uneven
from roles.learner.schedule import learning_rate
from roles.learner.torch_adapter import causal_model, genesis_factors, open_adapter
from roles.learner.torch_flops import Amount, Work, pairs_of, peak, speed_metrics
from roles.learner.torch_head import TokenScores
from roles.learner.torch_logprobs import score
from roles.learner.torch_loss import StepTotals, TokenBatch, loss_contribution
from roles.learner.torch_loss_metrics import loss_metrics, ratio_deviation
from roles.learner.torch_optimizer import FactorOptimizer
from roles.learner.torch_replicas import Replicas, deal_prompts
from roles.learner.torch_rows import Row, Rows
from roles.policy.compose import Factors, fault

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class StepRecord:
    """What the backward passes of one step leave behind for its metrics."""

    loss: float = 0.0
    batches: list[TokenBatch] = field(default_factory=list)
    on_policy: list[bool] = field(default_factory=list)
    sample_tokens: int = 0
    """Of all prompts and completions, a prompt once for each completion."""
    forwarded_tokens: int = 0
    """That went through the model."""
    held_tokens: int = 0
    """With padding."""
    pairs: int = 0
    """Of a token and one that it attends to."""
    fwd_s: float = 0.0
    bwd_s: float = 0.0

    @classmethod
    def joined(cls, records: Sequence[StepRecord], device: torch.device) -> StepRecord:
        """What several devices did at the same time; their numbers go to ``device``."""
        whole = cls(fwd_s=max(r.fwd_s for r in records), bwd_s=max(r.bwd_s for r in records))
        for record in records:
            whole.loss += record.loss
            whole.batches += [batch.to(device) for batch in record.batches]
            whole.on_policy += record.on_policy
            whole.sample_tokens += record.sample_tokens
            whole.forwarded_tokens += record.forwarded_tokens
            whole.held_tokens += record.held_tokens
            whole.pairs += record.pairs
        return whole


class TorchPolicy:
    """Implements ``roles.learner.policy.Policy`` on CPU, CUDA or MPS. Not for concurrent use."""

    def __init__(
        self, models: Sequence[PeftModel], spec: RunSpec, seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        """Train the factors of ``models``, one a device (``open`` makes them); ``seconds`` times the phases
        of a step."""
        self._replicas = Replicas(models)
        self._model = models[0]
        self._causal = causal_model(self._model)
        self._spec = spec
        self._seconds = seconds
        self._factors = self._replicas.factors
        self._shapes: Factors = {
            name: np.broadcast_to(np.float32(0), tuple(tensor.shape))
            for name, tensor in self._factors.items()
        }
        self._device = self._replicas.devices[0]
        self._rows = Rows(self._causal, self._device)
        others = zip(models[1:], self._replicas.devices[1:], strict=True)
        self._layouts = [self._rows, *(Rows(causal_model(m), d) for m, d in others)]
        self._work = Work.of(self._model)
        self._peak = peak(self._replicas.devices, getattr(torch, spec.model.dtype))
        self._optimizer = FactorOptimizer(self._factors, spec.learner)
        self.load(self.genesis(spec.seed))

    @classmethod
    def open(cls, model_dir: Path, spec: RunSpec, device: str = "cpu") -> TorchPolicy:
        """Load the base model of ``spec`` from a local directory, onto each device that ``device`` lists.

        Raises OperatorError if that fails.
        """
        devices = [torch.device(name) for name in device.split(",")]
        return cls([open_adapter(model_dir, spec.model, spec.lora, d, spec.learner) for d in devices], spec)

    def genesis(self, seed: int) -> Factors:
        """Fresh factors for ``seed``, the same bytes on every machine; the policy itself is unchanged."""
        return genesis_factors({name: tuple(tensor.shape) for name, tensor in self._factors.items()}, seed)

    def load(self, factors: Factors) -> None:
        """Set the factors and keep the optimizer's moments.

        Raises ValueError before a single number is copied unless names, shapes and dtypes are this run's
        and every number is finite.
        """
        if reason := fault(factors, self._shapes):
            raise ValueError(f"not an adapter of this run: {reason}")
        with torch.no_grad():
            for name, parameter in self._factors.items():
                parameter.copy_(torch.from_numpy(np.require(factors[name], requirements="W")))
        self._replicas.spread()

    def factors(self) -> Factors:
        """A copy of the current factors, fp32."""
        return {name: tensor.copy() for name, tensor in self.current().items()}

    def current(self) -> Factors:
        """The factors to read at once; on a CPU they are the policy's own memory."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self._factors.items()}

    def state(self) -> Future[State]:
        """A copy of Adam's moments and step counts; a step depends on nothing else but factors and input."""
        return self._optimizer.state()

    def restore(self, state: State) -> None:
        """Return to a saved state. Raises ValueError if it belongs to other factors."""
        self._optimizer.restore(state)

    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        """One optimizer step over all ``samples``; ``update`` (from 0) sets the learning rate.

        A step without anything to train on, or whose gradient is not finite, changes nothing at all.
        Raises ValueError on a sample whose ids, log-probabilities and mask differ in number.
        """
        counted, trained = self._divide(samples)
        totals = StepTotals(sum(s.trained_tokens for s in counted), len(counted))
        rate = learning_rate(self._spec.learner, update)
        metrics = {"learning_rate": rate, "batch/samples_per_step": float(len(samples))}
        if not trained:
            return StepResult(updated=False, metrics=metrics | {"step/skipped_empty_total": 1.0})
        record = self._accumulate(trained, totals)
        started = self._now()
        # A NaN in the loss need not reach the gradient: clamp gives it none. It is a fault all the same.
        grad_norm = self._optimizer.step(rate) if math.isfinite(record.loss) else None
        self._replicas.spread()
        metrics |= self._metrics(record) | {"perf/optimizer_s": self._now() - started}
        self._replicas.zero_gradients()
        if grad_norm is None:
            log.warning("gradient_not_finite", update=update)
            finite = {name: value for name, value in metrics.items() if np.isfinite(value)}
            return StepResult(updated=False, metrics=finite | {"step/skipped_nonfinite_total": 1.0})
        return StepResult(updated=True, metrics=metrics | {"grad_norm": grad_norm})

    def _divide(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
        """Samples that the loss divides by, and those of them that can have a gradient."""
        for sample in samples:
            if reason := uneven(sample):
                raise ValueError(reason)
        loss = self._spec.loss
        counted = [s for s in samples if s.trained_tokens and not (loss.mask_truncated and s.truncated)]
        all_teach = loss.kl_beta > 0 or loss.entropy_coef > 0
        teaching = [s for s in counted if s.advantage != 0]
        return counted, counted if all_teach else teaching

    def _accumulate(self, trained: Sequence[Sample], totals: StepTotals) -> StepRecord:
        """The gradient of the whole step: each device one micro-batch after the other, then their sum."""
        self._replicas.zero_gradients()
        hands = deal_prompts(trained, len(self._replicas))

        def work(replica: int) -> StepRecord:
            record, own = StepRecord(), [trained[i] for i in hands[replica]]
            for indices, rows in self._layouts[replica].of(own, self._spec.learner.micro_batch_tokens):
                self._backward(replica, [own[i] for i in indices], rows, totals, record)
            return record

        records = self._replicas.each(work)
        self._replicas.gather()
        return StepRecord.joined(records, self._device)

    def _backward(
        self, replica: int, samples: Sequence[Sample], rows: Row, totals: StepTotals, record: StepRecord
    ) -> None:
        """Add one micro-batch's gradient on its device, and what it was to ``record``."""
        device = self._replicas.devices[replica]
        started = self._now(device)
        batch = self._forward(self._replicas.models[replica], samples, rows, record)
        loss = loss_contribution(batch, self._spec.loss, totals)
        forwarded = self._now(device)
        loss.backward()
        record.loss += float(loss.detach())
        record.batches.append(batch.detached())
        record.on_policy += [sample.on_policy for sample in samples]
        record.fwd_s += forwarded - started
        record.bwd_s += self._now(device) - forwarded

    def _forward(
        self, model: PeftModel, samples: Sequence[Sample], rows: Row, record: StepRecord
    ) -> TokenBatch:
        device = rows.rows.device
        record.pairs += pairs_of(rows)
        record.held_tokens += rows.token_ids.numel()
        record.forwarded_tokens += rows.tokens
        record.sample_tokens += sum(len(s.prompt_token_ids) + len(s.token_ids) for s in samples)
        scores = score(causal_model(model), rows, entropy_gradient=self._spec.loss.entropy_coef > 0)
        return TokenBatch(
            learner_logprobs=scores.logprobs,
            sampler_logprobs=_tensor(
                np.concatenate([s.sampler_logprobs[s.trained] for s in samples]), device
            ),
            rows=rows.rows,
            advantages=_tensor(np.array([s.advantage for s in samples]), device),
            entropy=scores.entropy,
            genesis_logprobs=_genesis_scores(model, rows).logprobs if self._spec.loss.kl_beta > 0 else None,
        )

    def _metrics(self, record: StepRecord) -> dict[str, float]:
        step = TokenBatch.joined(record.batches)
        metrics = loss_metrics(step, self._spec.loss) | {
            "loss": record.loss,
            "batch/microbatches_per_step": float(len(record.batches)),
            "batch/trained_tokens_per_step": float(step.rows.numel()),
            "batch/forwarded_tokens_per_step": float(record.forwarded_tokens),
            "batch/shared_tokens_per_step": float(record.sample_tokens - record.forwarded_tokens),
            "batch/pad_frac": 1 - record.forwarded_tokens / record.held_tokens,
            "perf/fwd_s": record.fwd_s,
            "perf/bwd_s": record.bwd_s,
        }
        amount = Amount(record.forwarded_tokens, int(step.rows.numel()), record.pairs)
        seconds, genesis = record.fwd_s + record.bwd_s, self._spec.loss.kl_beta > 0
        metrics |= speed_metrics(self._work, self._peak, amount, seconds, genesis=genesis)
        on_policy = torch.tensor(record.on_policy, device=self._device)
        deviation = ratio_deviation(step, on_policy, self._spec.loss)
        return metrics if deviation is None else metrics | {"ratio_max_dev_on_policy": deviation}

    def _now(self, device: torch.device | None = None) -> float:
        """Seconds, once ``device`` (by default the first) has done what it was given."""
        device = device or self._device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return self._seconds()


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)


def _genesis_scores(model: PeftModel, rows: Row) -> TokenScores:
    """Genesis has B = 0, so it is the model without its adapter."""
    with torch.no_grad(), model.disable_adapter():
        return score(causal_model(model), rows)
