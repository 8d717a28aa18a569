"""The transformers engine under virtual time: its model and its decoding, without its thread.

    sample() ──▶ queue ──▶ a free lane: form a batch ▸ decode it at once ▸ let its time pass ▸ answer

A lane is a device that decodes one batch at a time, and a batch takes the same time whatever is in it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

import torch

from protocol.ports import Clock
from roles.policy.compose import Factors
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.residents import Residents, check_request
from roles.sampler.transformers_batch import Batch, Chunk, Job
from roles.sampler.transformers_lora import Adapter
from roles.sampler.transformers_model import ServedModel


class EmulatedEngine:
    """Implements ``Engine``. Several of them may share a model: one thread runs everything."""

    def __init__(
        self,
        model: ServedModel,
        eos_ids: frozenset[int],
        clock: Clock,
        *,
        lanes: int,
        groups_per_batch: int,
        batch_s: float,
        rows: int,
    ) -> None:
        """``batch_s`` is what a batch takes; ``rows`` are the completions of a usual request."""
        self._model = model
        self._eos_ids = eos_ids
        self._clock = clock
        self._free = lanes
        self._groups_per_batch = groups_per_batch
        self._batch_s = batch_s
        self._residents: Residents[Adapter] = Residents(model.facts.shapes, model.facts.place)
        self._queue: deque[tuple[Job, asyncio.Future[Sampled]]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self.groups_max = lanes * groups_per_batch * rows
        """Requests of one rollout that can decode together."""

    @property
    def name(self) -> str:
        """Engine and version."""
        return self._model.facts.engine

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Make a policy available. Raises EngineError on any fault."""
        self._residents.load(name, factors, newest=newest)

    async def unload_policy(self, name: str) -> None:
        """Forget a policy; requests that already have it finish under it."""
        self._residents.unload(name)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Queue a request and wait for it."""
        facts = self._model.facts
        check_request(request, vocab_size=facts.vocab_size, context_tokens=facts.context_tokens)
        pinned = None if request.policy is None else self._residents.get(request.policy)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sampled] = loop.create_future()
        self._queue.append((Job(request, pinned, waiting=list(range(request.count))), answer))
        loop.call_soon(self._start)  # all requests of this turn of the loop may share a batch
        return await answer

    async def abandon(self, policy: str) -> None:
        """A batch is decoded before its time passes: there is nothing to stop."""

    async def conclude(self) -> None:
        """The same."""

    async def close(self) -> None:
        """Nothing is left behind."""

    def _start(self) -> None:
        """Give waiting requests to free lanes."""
        while self._free and (batch := self._take()):
            self._free -= 1
            task = asyncio.create_task(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _take(self) -> list[tuple[Job, asyncio.Future[Sampled]]]:
        """The oldest requests that begin under one policy."""
        taken: list[tuple[Job, asyncio.Future[Sampled]]] = []
        left: deque[tuple[Job, asyncio.Future[Sampled]]] = deque()
        for job, answer in self._queue:
            if answer.done():
                continue
            adapter = job.adapter or self._residents.get(None)
            first = taken[0][0].adapter if taken else adapter
            if len(taken) == self._groups_per_batch or adapter is not first:
                left.append((job, answer))
            else:
                job.adapter = adapter
                taken.append((job, answer))
        self._queue = left
        return taken

    async def _run(self, batch: list[tuple[Job, asyncio.Future[Sampled]]]) -> None:
        self._decode([job for job, _ in batch])
        await self._clock.sleep(self._batch_s)
        for job, answer in batch:
            if not answer.done():
                answer.set_result(replace(job.future.result(), generation_s=self._batch_s))
        self._free += 1
        self._start()

    def _decode(self, jobs: list[Job]) -> None:
        adapter = jobs[0].adapter
        assert adapter is not None, "the policy is fixed when a batch is formed"
        with torch.inference_mode():
            joining = [Chunk(job, adapter, job.waiting) for job in jobs]
            decoding = Batch(self._model, self._eos_ids, self._clock.monotonic)
            for job in jobs:
                job.waiting = []
            decoding.step(joining)
            while decoding.live:
                decoding.step([])
