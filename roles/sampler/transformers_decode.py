"""A batch of rollouts that decode together, one token a step, under one policy.

    Job (a request) ──▶ Chunk (some of its rollouts) ──▶ rows of a Batch

Rows are *live* until they finish, are cancelled, or meet their deadline; live rows stay packed at the
front of the cache. The policy is fixed when the batch begins. Nothing here knows threads or queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import EngineError
from protocol.messages import FinishReason, Rollout
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.transformers_cache import RowCache
from roles.sampler.transformers_model import Adapter, ServedModel
from roles.sampler.transformers_sampling import RowParams, draw, sampling_logprobs
from roles.streams import rollout_stream


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the engine. ``future`` is cancelled by whoever stops waiting."""

    request: SampleRequest
    adapter: Adapter | None
    """None until the first rows start, if the request asks for the newest policy."""
    future: Future[Sampled] = field(default_factory=Future)
    started_at: float | None = None
    waiting: list[int] = field(default_factory=list)
    """Indices of rollouts that are in no batch yet."""
    rows: int = 0
    """Live rows."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    def over(self, now: float) -> bool:
        """Cancelled, failed, or past its deadline."""
        if self.future.done():
            return True
        return self.started_at is not None and now - self.started_at >= self.request.deadline_s

    def resolve(self, now: float) -> None:
        """Hand over what is finished."""
        assert self.adapter is not None, "only started jobs resolve"
        assert self.started_at is not None, "only started jobs resolve"
        rollouts = tuple(self.rollouts[index] for index in sorted(self.rollouts))
        with suppress(InvalidStateError):  # cancelled a moment ago
            self.future.set_result(Sampled(self.adapter.name, rollouts, max(0.0, now - self.started_at)))

    def fail(self, error: EngineError) -> None:
        """Tell the caller; no effect on a job that is done."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(eq=False, frozen=True, slots=True)
class Chunk:
    """Rollouts of one job that share a prefill."""

    job: Job
    indices: Sequence[int]


@dataclass(slots=True)
class _Row:
    """One rollout being sampled."""

    chunk: Chunk
    index: int
    uniforms: NDArray[np.float64]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, chunk: Chunk, index: int) -> _Row:
        request = chunk.job.request
        stream = rollout_stream(request.seed, index)
        return cls(chunk, index, stream.random(request.params.max_new_tokens))


class Batch:
    """Rows that step together. ``step`` until ``live`` is 0."""

    def __init__(
        self,
        model: ServedModel,
        chunks: Sequence[Chunk],
        eos_ids: frozenset[int],
        monotonic: Callable[[], float],
    ) -> None:
        self._monotonic = monotonic
        self._model = model
        self._eos_ids = eos_ids
        self._rows = [_Row.start(chunk, index) for chunk in chunks for index in chunk.indices]
        self._cache: RowCache | None = None
        self._pads_N = torch.zeros(len(self._rows), dtype=torch.int64)
        self._params = self._columns()
        for chunk in chunks:
            chunk.job.rows += len(chunk.indices)

    @property
    def live(self) -> int:
        """Rows still sampling."""
        return len(self._rows)

    def step(self) -> None:
        """Drop what is over, then sample one token for every live row and let finished rows leave.

        Raises EngineError if the model's output is not finite, RuntimeError if the device fails.
        """
        now = self._monotonic()
        jobs = dict.fromkeys(row.chunk.job for row in self._rows)
        for job in jobs:
            job.started_at = now if job.started_at is None else job.started_at
        over = {job for job in jobs if job.over(now)}
        self._keep([row.chunk.job not in over for row in self._rows], now)
        if not self._rows:
            return
        logits_NV = self._prefill() if self._cache is None else self._decode(self._cache)
        uniforms = [row.uniforms[len(row.tokens)] for row in self._rows]
        uniforms_N = torch.tensor(uniforms, dtype=torch.float64)
        if logits_NV.device.type == "mps":
            uniforms_N = uniforms_N.float().clamp(max=1 - 2**-24)
        drawn = draw(sampling_logprobs(logits_NV, self._params), uniforms_N.to(logits_NV.device))
        tokens, logprobs = (column.tolist() for column in drawn)
        if not np.isfinite(logprobs).all():
            raise EngineError("the model's logits are not finite")
        for row, token, logprob in zip(self._rows, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        self._keep([not self._finish(row) for row in self._rows], now)

    def _finish(self, row: _Row) -> bool:
        """File the rollout if its last token ended it."""
        stopped = row.tokens[-1] in self._eos_ids
        if not stopped and len(row.tokens) < len(row.uniforms):
            return False
        row.chunk.job.rollouts[row.index] = Rollout(
            index=row.index,
            token_ids=row.tokens,
            # Rounding can lift the log of a certain token above 0.
            sampler_logprobs=np.minimum(np.array(row.logprobs, np.float32), 0.0),
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )
        return True

    def _prefill(self) -> torch.Tensor:
        """Run every prompt once; rows of a chunk are neighbours here, since none has moved yet."""
        rows_of = Counter(row.chunk for row in self._rows)
        prompts = [torch.from_numpy(c.job.request.prompt_token_ids.astype(np.int64)) for c in rows_of]
        repeats = list(rows_of.values())
        longest = max(len(prompt) for prompt in prompts)
        pads = torch.tensor([longest - len(prompt) for prompt in prompts])
        self._pads_N = pads.repeat_interleave(torch.tensor(repeats))
        logits, self._cache = self._model.prefill(prompts, repeats)
        return logits

    def _decode(self, cache: RowCache) -> torch.Tensor:
        last = torch.tensor([row.tokens[-1] for row in self._rows])
        return self._model.decode(last, self._pads_N, cache)

    def _keep(self, alive: Sequence[bool], now: float) -> None:
        """Let the other rows leave; survivors from the back move into the gaps at the front."""
        if all(alive):
            return
        leaving = [row.chunk.job for row, stays in zip(self._rows, alive, strict=True) if not stays]
        for job in leaving:
            job.rows -= 1
        if self._cache is None:
            self._rows = [row for row, stays in zip(self._rows, alive, strict=True) if stays]
        else:
            self._move(alive, self._cache)
        self._params = self._columns() if self._rows else self._params
        for job in dict.fromkeys(leaving):
            if job.over(now):
                job.waiting.clear()
            if not job.rows and not job.waiting:
                job.resolve(self._monotonic())

    def _move(self, alive: Sequence[bool], cache: RowCache) -> None:
        count = sum(alive)
        holes = [slot for slot in range(count) if not alive[slot]]
        movers = [slot for slot in range(count, len(alive)) if alive[slot]]
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        self._pads_N[holes] = self._pads_N[movers]
        del self._rows[count:]
        self._pads_N = self._pads_N[:count]
        device = self._model.facts.device
        cache.keep(count, torch.tensor(holes, device=device), torch.tensor(movers, device=device))

    def _columns(self) -> RowParams:
        return RowParams.of([row.chunk.job.request.params for row in self._rows], self._model.facts.device)
