"""The embedded engine: transformers on one device, many policies resident, one thread that owns the model.

    sample() ──▶ queue ──▶ worker thread: admit who fits ▸ one step ▸ finished rows leave ▸ again
       ▲                                        │
       └────────── each job's own future ◀──────┘

Rows of many groups and several policies decode together; whoever waits joins between two steps, under the
newest policy of that moment. With ``groups_per_batch=1`` a request always runs alone, so that its result
depends on nothing but itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import torch

from protocol.errors import EngineError, OperatorError
from protocol.runspec import LoraSpec
from roles.policy.compose import Factors
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.residents import Residents, check_request
from roles.sampler.transformers_admission import Limits, admit, halved
from roles.sampler.transformers_batch import Batch, Chunk, Job
from roles.sampler.transformers_lora import Adapter
from roles.sampler.transformers_memory import give_back, is_out_of_memory, tokens_that_fit
from roles.sampler.transformers_model import ServedModel

log = structlog.get_logger()

PROMPT_TOKENS = {"cpu": 512}
PROMPT_TOKENS_MAX = 8192
"""Prompt tokens of one step, by device: more make prefill more efficient and hold up the rows that decode."""


class TransformersEngine:
    """Implements ``Engine``. Make one with ``open``."""

    def __init__(
        self,
        model: ServedModel,
        eos_ids: Sequence[int],
        *,
        rows_max: int,
        groups_per_batch: int | None,
        threads: int,
        tokens_max: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the worker, which becomes the only owner of ``model``. For the limits see ``open``."""
        self._facts = facts = model.facts
        self._eos_ids = frozenset(eos_ids)
        self._limits = Limits(
            rows=rows_max,
            tokens=tokens_max or tokens_that_fit(facts.device, facts.token_bytes),
            groups=groups_per_batch,
            prompt_tokens=PROMPT_TOKENS.get(facts.device.type, PROMPT_TOKENS_MAX),
        )
        self._monotonic = monotonic
        self._residents: Residents[Adapter] = Residents(facts.shapes, facts.place)
        self._arrived: list[Job] = []
        self._jobs: set[Job] = set()
        """Everything that somebody waits for; belongs to the loop's thread."""
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._over: str | None = None
        """Why nothing can be sampled any more."""
        self._thread = threading.Thread(
            target=self._work, args=(model, threads), name="transformers-engine", daemon=True
        )
        self._thread.start()

    @classmethod
    def open(
        cls,
        model_dir: Path,
        lora: LoraSpec,
        eos_ids: Sequence[int],
        *,
        device: str,
        dtype: str,
        rows_max: int,
        groups_per_batch: int | None,
        threads: int,
        bits: int | None = None,
        tokens_max: int | None = None,
    ) -> TransformersEngine:
        """Load a model directory and start. Takes seconds: call it off the event loop.

        ``rows_max`` bounds the rollouts that decode together, ``groups_per_batch`` the requests (None: only
        rows and memory count), ``tokens_max`` the tokens whose keys and values are held (None: what the
        free memory takes). Raises OperatorError if the model, the LoRA or ``eos_ids`` do not fit.
        """
        torch.set_num_threads(threads)
        model = ServedModel.load(model_dir, lora, device=device, dtype=dtype, bits=bits)
        if not eos_ids or not all(0 <= eos < model.facts.vocab_size for eos in eos_ids):
            raise OperatorError(f"{model_dir}: EOS ids {list(eos_ids)} are not in its vocabulary")
        engine = cls(
            model,
            eos_ids,
            rows_max=rows_max,
            groups_per_batch=groups_per_batch,
            threads=threads,
            tokens_max=tokens_max,
        )
        limits = engine._limits
        log.info("engine_opened", engine=engine.name, rows_max=rows_max, tokens_max=limits.tokens)
        return engine

    @property
    def name(self) -> str:
        """Engine and version."""
        return self._facts.engine

    @property
    def groups_max(self) -> int:
        """Requests of one rollout that can decode together."""
        return self._limits.groups or self._limits.rows

    @property
    def shapes(self) -> Factors:
        """Names and shapes of the factors that every policy must have."""
        return self._facts.shapes

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Make a policy available; running rows are not touched. Raises EngineError on any fault."""
        await asyncio.to_thread(self._residents.load, name, factors, newest=newest)

    async def unload_policy(self, name: str) -> None:
        """Forget a policy; requests that already have it finish under it."""
        self._residents.unload(name)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Queue a request and wait for it. Cancelling drops its rows at the next step."""
        check_request(request, vocab_size=self._facts.vocab_size, context_tokens=self._facts.context_tokens)
        adapter = self._residents.get(request.policy)
        job = Job(request, None if request.policy is None else adapter, waiting=list(range(request.count)))
        self._jobs.add(job)
        try:
            self._arrived.append(job)
            asyncio.get_running_loop().call_soon(self._enqueue)
            return await asyncio.wrap_future(job.future)
        finally:
            self._jobs.discard(job)

    async def abandon(self, policy: str) -> None:
        """Fail what runs under ``policy`` without having asked for it by name."""
        for job in tuple(self._jobs):
            if job.request.policy is None and job.adapter is not None and job.adapter.name == policy:
                job.fail(EngineError(f"policy {policy} has become too old for anybody"))

    async def conclude(self) -> None:
        """Resolve what runs with the rollouts that are finished, at the next step; fail what waits."""
        for job in tuple(self._jobs):
            if not job.begun:
                job.fail(EngineError("the engine concludes its work"))
            job.concluded = True
        self._enqueue()

    async def close(self) -> None:
        """Stop at the next step; whatever waits or runs fails with EngineError."""
        self._closing = True
        self._enqueue()
        await asyncio.to_thread(self._thread.join)

    def _enqueue(self) -> None:
        """Hand all requests of this turn of the loop to the worker at once, so that they start together."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            self._queue.extend(arrived)
            self._changed.notify()
            over = self._over
        if over is not None:
            for job in arrived:
                job.fail(EngineError(over))

    # --- below here everything runs on the worker thread -------------------------------------------

    def _work(self, model: ServedModel, threads: int) -> None:
        torch.set_num_threads(threads)
        batch, joining = Batch(model, self._eos_ids, self._monotonic), list[Chunk]()
        try:
            with torch.inference_mode():
                while self._next(batch, joining):
                    self._step(batch, joining)
        finally:
            # A crash is reported by threading's excepthook; here nobody is left waiting for it.
            crash = sys.exc_info()[1]
            self._end(
                "the engine is closed" if crash is None else f"the engine's thread died: {crash!r}",
                [chunk.job for chunk in (*batch.chunks, *joining)],
            )

    def _step(self, batch: Batch, joining: list[Chunk]) -> None:
        """One token for every row. A failure of the model or the device is the batch's own."""
        held, rows = [*batch.chunks, *joining], batch.live + sum(len(chunk.indices) for chunk in joining)
        try:
            batch.step(joining)
        except RuntimeError as exc:  # torch reports devices and memory as RuntimeError
            jobs = batch.clear()
            give_back(self._facts.device)
            if is_out_of_memory(exc) and rows > 1:
                self._limits.tokens = halved(self._limits, held, rows)
                log.warning("memory_exhausted", rows=rows, tokens_max=self._limits.tokens, error=str(exc))
                with self._changed:
                    queued = set(self._queue)
                    self._queue.extendleft(job for job in reversed(jobs) if job not in queued)
                return
            log.warning("batch_failed", requests=len(jobs), error=repr(exc))
            for job in jobs:
                job.fail(EngineError(f"sampling failed: {exc}"))

    def _next(self, batch: Batch, joining: list[Chunk]) -> bool:
        """Wait for work and put who joins into ``joining``; False when closing."""
        with self._changed:
            while not self._closing:
                self._forget_what_is_over()
                joining[:] = admit(self._queue, batch.chunks, batch.live, self._limits, self._adapter_of)
                if joining or batch.live:
                    return True
                self._changed.wait()
            return False

    def _forget_what_is_over(self) -> None:
        """Drop jobs that nobody waits for any more, or that cannot start."""
        left = []
        for job in self._queue:
            try:
                self._adapter_of(job)
            except EngineError as exc:
                job.fail(exc)
            if job.concluded and not job.rows and not job.future.done():
                job.resolve(job.started_at or 0.0)
            if not job.future.done():
                left.append(job)
        self._queue = deque(left)

    def _adapter_of(self, job: Job) -> Adapter:
        """The policy that ``job`` would start under now. Raises EngineError if there is none."""
        return job.adapter or self._residents.get(None)

    def _end(self, reason: str, running: Sequence[Job]) -> None:
        with self._changed:
            self._over = reason
            jobs = [*running, *self._queue]
            self._queue.clear()
        for job in jobs:
            job.fail(EngineError(reason))
