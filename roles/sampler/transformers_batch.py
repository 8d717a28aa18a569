"""The rows that decode together, one token a step, whatever groups and policies they belong to.

    Job (a request) ──▶ Chunk (some of its rollouts) ──▶ rows of the Batch

Chunks join between steps and rows leave as soon as they finish, are cancelled, or meet their deadline. A
row keeps the policy it began with. Nothing here knows threads or queues.
"""

from __future__ import annotations

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
from roles.sampler.transformers_cache import SharedCache
from roles.sampler.transformers_lora import Adapter, runs_of
from roles.sampler.transformers_model import ServedModel
from roles.sampler.transformers_sampling import draw
from roles.streams import rollout_stream
from roles.torch_sampling import RowParams, sampling_logits


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the engine. ``future`` is cancelled by whoever stops waiting."""

    request: SampleRequest
    adapter: Adapter | None
    """None until the first rows start, if the request asks for the newest policy."""
    future: Future[Sampled] = field(default_factory=Future)
    begun: bool = False
    """Rows have started, under ``adapter``."""
    started_at: float | None = None
    first_token_at: float | None = None
    held_before: float = 0.0
    """What the batch had been held when this job started."""
    concluded: bool = False
    """What is finished is enough."""
    waiting: list[int] = field(default_factory=list)
    """Indices of rollouts that are in no batch."""
    rows: int = 0
    """Live rows."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    def over(self, now: float) -> bool:
        """Cancelled, failed, concluded, or past its deadline."""
        if self.concluded or self.future.done():
            return True
        return self.started_at is not None and now - self.started_at >= self.request.deadline_s

    def resolve(self, now: float, held: float | None = None) -> None:
        """Hand over what is finished; ``held`` is what the batch has been held so far."""
        assert self.adapter is not None, "only started jobs resolve"
        assert self.started_at is not None, "only started jobs resolve"
        rollouts = tuple(self.rollouts[index] for index in sorted(self.rollouts))
        first = None if self.first_token_at is None else self.first_token_at - self.started_at
        held_s = None if held is None else held - self.held_before
        generation_s = max(0.0, now - self.started_at)
        with suppress(InvalidStateError):  # cancelled a moment ago
            self.future.set_result(Sampled(self.adapter.name, rollouts, generation_s, first, held_s))

    def fail(self, error: EngineError) -> None:
        """Tell the caller; no effect on a job that is done."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(eq=False, frozen=True, slots=True)
class Chunk:
    """Rollouts of one job that share a prompt's keys and values."""

    job: Job
    adapter: Adapter
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

    @property
    def full(self) -> bool:
        """Whether the completion has as many tokens as it may have."""
        return len(self.tokens) == len(self.uniforms)


class Batch:
    """Rows that step together. ``step`` while ``live`` is not 0 or somebody joins."""

    def __init__(self, model: ServedModel, eos_ids: frozenset[int], monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._model = model
        self._eos_ids = eos_ids
        self._rows: list[_Row] = []
        self._joining: list[Chunk] = []
        self._cache = SharedCache()
        self._params: RowParams | None = None
        """Sampling parameters of the rows; None when rows have come or gone."""
        self._stepped_at = 0.0
        """When the last tokens were sampled."""
        self._held_s = 0.0
        """From there to the next step, while rows waited for it."""

    @property
    def live(self) -> int:
        """Rows still sampling."""
        return len(self._rows)

    @property
    def chunks(self) -> list[Chunk]:
        """Chunks with live rows."""
        return list(dict.fromkeys(row.chunk for row in self._rows))

    def step(self, joining: Sequence[Chunk]) -> None:
        """Drop what is over, then sample one token for every live row and the first one of those that join.

        Rows whose logits are not finite fail their job. Raises RuntimeError if the device fails; ``clear``
        then says who is affected.
        """
        now = self._monotonic()
        if self._rows:
            self._held_s += now - self._stepped_at
        self._joining = list(joining)
        for chunk in joining:
            chunk.job.rows += len(chunk.indices)
            if chunk.job.started_at is None:
                chunk.job.started_at, chunk.job.held_before = now, self._held_s
        self._keep([not row.chunk.job.over(now) for row in self._rows], now)
        self._joining = [chunk for chunk in joining if not self._turned_away(chunk, now)]
        logits = []
        if self._rows:
            tokens = [row.tokens[-1] for row in self._rows]
            adapters = [row.chunk.adapter for row in self._rows]
            logits.append(self._model.decode(tokens, adapters, self._cache))
        logits += [self._prefill(some) for some in _by_adapter(self._joining)]
        self._joining = []
        if self._rows:
            self._sample(logits[0] if len(logits) == 1 else torch.cat(logits))
            self._keep([not self._finish(row) for row in self._rows], now)

    def clear(self) -> list[Job]:
        """Give all rows back to their jobs, to be started again, and forget them. Returns the jobs."""
        jobs = list(dict.fromkeys([row.chunk.job for row in self._rows] + [c.job for c in self._joining]))
        for row in self._rows:
            row.chunk.job.waiting.append(row.index)
        for chunk in self._joining:
            chunk.job.waiting.extend(chunk.indices)
        for job in jobs:
            job.waiting = sorted(set(job.waiting))
            job.rows = 0
        self._rows, self._joining, self._params = [], [], None
        self._cache = SharedCache()
        return jobs

    def _turned_away(self, chunk: Chunk, now: float) -> bool:
        """Whether a chunk that would join is over already."""
        if not chunk.job.over(now):
            return False
        chunk.job.rows -= len(chunk.indices)
        self._left([chunk.job], now)
        return True

    def _prefill(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run every prompt once and let the rows join."""
        prompts = [torch.from_numpy(c.job.request.prompt_token_ids.astype(np.int64)) for c in chunks]
        counts = [len(chunk.indices) for chunk in chunks]
        logits = self._model.prefill(prompts, counts, chunks[0].adapter, self._cache)
        self._rows += [_Row.start(chunk, index) for chunk in chunks for index in chunk.indices]
        self._joining = [chunk for chunk in self._joining if chunk not in chunks]
        self._params = None
        return logits

    def _sample(self, logits_NV: torch.Tensor) -> None:
        if self._params is None:
            params = [row.chunk.job.request.params for row in self._rows]
            self._params = RowParams.of(params, logits_NV.device)
        uniforms = [row.uniforms[len(row.tokens)] for row in self._rows]
        uniforms_N = torch.tensor(uniforms, dtype=torch.float64)
        if logits_NV.device.type == "mps":
            uniforms_N = uniforms_N.float().clamp(max=1 - 2**-24)
        drawn = draw(sampling_logits(logits_NV, self._params), uniforms_N.to(logits_NV.device))
        tokens, logprobs = (column.tolist() for column in drawn)
        self._stepped_at = self._monotonic()
        for row, token, logprob in zip(self._rows, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.chunk.job.first_token_at is None:
                row.chunk.job.first_token_at = self._stepped_at
        for row, finite in zip(self._rows, np.isfinite(logprobs), strict=True):
            if not finite:
                row.chunk.job.fail(EngineError("sampling failed: the model's logits are not finite"))

    def _finish(self, row: _Row) -> bool:
        """Whether the row leaves now; file the rollout if its last token ended it."""
        job = row.chunk.job
        if job.future.done():
            return True
        stopped = row.tokens[-1] in self._eos_ids
        if not stopped and not row.full:
            return False
        job.rollouts[row.index] = Rollout(
            index=row.index,
            token_ids=row.tokens,
            # Rounding can lift the log of a certain token above 0.
            sampler_logprobs=np.minimum(np.array(row.logprobs, np.float32), 0.0),
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )
        return True

    def _keep(self, alive: Sequence[bool], now: float) -> None:
        """Let the other rows leave; survivors from behind move into the gaps."""
        if all(alive):
            return
        leaving = [row.chunk.job for row, stays in zip(self._rows, alive, strict=True) if not stays]
        for job in leaving:
            job.rows -= 1
        if any(alive):
            runs = runs_of([row.chunk.adapter for row in self._rows])
            self._rows = [self._rows[place] for place in self._cache.keep(alive, runs)]
        else:
            self._rows, self._cache = [], SharedCache()
        self._params = None
        self._left(list(dict.fromkeys(leaving)), now)

    def _left(self, jobs: Sequence[Job], now: float) -> None:
        """Resolve jobs of which nothing runs or waits any more."""
        for job in jobs:
            if job.over(now):
                job.waiting.clear()
            if not job.rows and not job.waiting:
                job.resolve(self._monotonic(), self._held_s)


def _by_adapter(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks that can be prefilled together."""
    parts: dict[Adapter, list[Chunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.adapter, []).append(chunk)
    return list(parts.values())
