"""The embedded engine: transformers on one device, many policies resident, one thread that owns the model.

    sample() ──▶ queue ──▶ worker thread: form a batch ▸ step until it is empty ▸ next batch
       ▲                                        │
       └────────── each job's own future ◀──────┘

A batch holds requests for one policy, fixed when it begins; a request resolves as soon as its own rows
are finished. With ``groups_per_batch=1`` a request always runs alone, so that its result depends on
nothing but itself.
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
from roles.sampler.transformers_decode import Batch, Chunk, Job
from roles.sampler.transformers_model import Adapter, ServedModel

log = structlog.get_logger()


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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the worker, which becomes the only owner of ``model``."""
        self._facts = model.facts
        self._eos_ids = frozenset(eos_ids)
        self._rows_max = rows_max
        self._groups_per_batch = groups_per_batch
        self._monotonic = monotonic
        self._residents: Residents[Adapter] = Residents(model.facts.shapes, model.facts.place)
        self._arrived: list[Job] = []
        self._queue: deque[Job] = deque()
        self._running: list[Job] = []
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
    ) -> TransformersEngine:
        """Load a model directory and start. Takes seconds: call it off the event loop.

        ``rows_max`` bounds the rollouts that decode together, ``groups_per_batch`` the requests (None:
        only rows count). Raises OperatorError if the model, the LoRA or ``eos_ids`` do not fit.
        """
        torch.set_num_threads(threads)
        model = ServedModel.load(model_dir, lora, device=device, dtype=dtype, bits=bits)
        if not eos_ids or not all(0 <= eos < model.facts.vocab_size for eos in eos_ids):
            raise OperatorError(f"{model_dir}: EOS ids {list(eos_ids)} are not in its vocabulary")
        log.info("engine_opened", engine=model.facts.engine, rows_max=rows_max, groups=groups_per_batch)
        return cls(model, eos_ids, rows_max=rows_max, groups_per_batch=groups_per_batch, threads=threads)

    @property
    def name(self) -> str:
        """Engine and version."""
        return self._facts.engine

    @property
    def groups_max(self) -> int:
        """Requests of one rollout that can decode together."""
        return self._groups_per_batch or self._rows_max

    @property
    def shapes(self) -> Factors:
        """Names and shapes of the factors that every policy must have."""
        return self._facts.shapes

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Make a policy available; running batches are not touched. Raises EngineError on any fault."""
        await asyncio.to_thread(self._residents.load, name, factors, newest=newest)

    async def unload_policy(self, name: str) -> None:
        """Forget a policy; requests that already have it finish under it."""
        self._residents.unload(name)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Queue a request and wait for it. Cancelling drops its rows at the next step."""
        check_request(request, vocab_size=self._facts.vocab_size, context_tokens=self._facts.context_tokens)
        adapter = self._residents.get(request.policy)
        job = Job(request, None if request.policy is None else adapter, waiting=list(range(request.count)))
        self._arrived.append(job)
        asyncio.get_running_loop().call_soon(self._enqueue)
        return await asyncio.wrap_future(job.future)

    async def close(self) -> None:
        """Stop at the next step; whatever waits or runs fails with EngineError."""
        self._closing = True
        self._enqueue()
        await asyncio.to_thread(self._thread.join)

    def _enqueue(self) -> None:
        """Hand all requests of this turn of the loop to the worker at once, so that they share a batch."""
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
        try:
            with torch.inference_mode():
                while chunks := self._next_chunks():
                    self._run(model, chunks)
        finally:
            # A crash is reported by threading's excepthook; here nobody is left waiting for it.
            crash = sys.exc_info()[1]
            self._end("the engine is closed" if crash is None else f"the engine's thread died: {crash!r}")

    def _run(self, model: ServedModel, chunks: Sequence[Chunk]) -> None:
        """One batch to its end. A failure of the model or the device is the batch's own."""
        self._running = [chunk.job for chunk in chunks]
        try:
            adapter = chunks[0].job.adapter
            assert adapter is not None, "the policy is fixed when a batch is formed"
            model.activate(adapter)
            batch = Batch(model, chunks, self._eos_ids, self._monotonic)
            while batch.live and not self._closing:
                batch.step()
        except (EngineError, RuntimeError) as exc:  # torch reports devices and memory as RuntimeError
            log.warning("batch_failed", requests=len(chunks), error=repr(exc))
            for job in self._running:
                job.fail(EngineError(f"sampling failed: {exc}"))
        with self._changed:
            self._queue.extendleft(job for job in reversed(self._running) if not job.future.done())
            self._running = []

    def _next_chunks(self) -> list[Chunk]:
        """Wait for work and choose what goes into the next batch; nothing when closing."""
        with self._changed:
            while not self._closing:
                chunks = self._take()
                if chunks:
                    return chunks
                self._changed.wait()
            return []

    def _take(self) -> list[Chunk]:
        """Requests in order of arrival that share the first one's policy, while there is room.

        A request too large for any batch goes in pieces; others are never split.
        """
        chunks: list[Chunk] = []
        left: deque[Job] = deque()
        adapter, room, full = None, self._rows_max, False
        for job in self._queue:
            wanted = None if job.future.done() else self._adapter_of(job)
            if wanted is None:
                continue
            adapter = adapter or wanted
            count = min(len(job.waiting), self._rows_max)
            full = full or count > room or len(chunks) == self._groups_per_batch
            if full or wanted is not adapter:
                left.append(job)
                continue
            job.adapter = adapter
            chunks.append(Chunk(job, job.waiting[:count]))
            del job.waiting[:count]
            room -= count
        self._queue = left
        return chunks

    def _adapter_of(self, job: Job) -> Adapter | None:
        """The policy that ``job`` would start under now; a job that has none any more fails."""
        if job.adapter is not None:
            return job.adapter
        try:
            return self._residents.get(None)
        except EngineError as exc:
            job.fail(exc)
            return None

    def _end(self, reason: str) -> None:
        with self._changed:
            self._over = reason
            jobs = [*self._running, *self._queue]
            self._queue.clear()
        for job in jobs:
            job.fail(EngineError(reason))
