"""Who joins the batch next: in order of arrival, while rows, memory and this step's time for prompts last.

Pure: reads the queue and the batch, and says which chunks start. A request that has to wait holds up the
later ones, so that a large one is not passed by for ever. One that fits no batch goes in pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roles.sampler.transformers_batch import Chunk, Job
from roles.sampler.transformers_cache import SharedCache
from roles.sampler.transformers_lora import Adapter


@dataclass(slots=True)
class Limits:
    """What a batch may grow to."""

    rows: int
    tokens: int
    """Keys and values held at once, counted in tokens; shrinks when the device says that it was too much."""
    groups: int | None
    """Requests at once; None if only rows and tokens count."""
    prompt_tokens: int
    """Prompt tokens that one step takes in, one prompt at least: rows that decode wait for it."""


@dataclass(slots=True)
class _Load:
    """What a batch holds, or would hold."""

    rows: int = 0
    chunks: int = 0
    longest_new: int = 0
    longest_prompt: int = 0

    def plus(self, job: Job, rows: int) -> _Load:
        request = job.request
        return _Load(
            self.rows + rows,
            self.chunks + 1,
            max(self.longest_new, request.params.max_new_tokens),
            max(self.longest_prompt, len(request.prompt_token_ids)),
        )

    def fits(self, limits: Limits) -> bool:
        held = SharedCache.tokens_held(self.rows, self.longest_new, self.chunks, self.longest_prompt)
        return self.rows <= limits.rows and held <= limits.tokens


def admit(
    queue: deque[Job], live: Sequence[Chunk], rows: int, limits: Limits, adapter_of: Callable[[Job], Adapter]
) -> list[Chunk]:
    """Take from ``queue`` what joins ``live``, which has so many ``rows``; jobs in pieces stay at its front.

    ``adapter_of`` says under which policy a job starts now.
    """
    load = _Load()
    for chunk in live:
        load = load.plus(chunk.job, 0)
    load.rows = rows
    jobs = {chunk.job for chunk in live}
    chunks: list[Chunk] = []
    prompt_tokens = 0
    while queue:
        job = queue[0]
        prompt_tokens += len(job.request.prompt_token_ids)
        if chunks and prompt_tokens > limits.prompt_tokens:
            break
        if limits.groups is not None and len(jobs | {job}) > limits.groups:
            break
        count = _piece(job, limits)
        grown = load.plus(job, count)
        if load.rows and not grown.fits(limits):
            break
        load = grown
        jobs.add(job)
        job.adapter, job.begun = adapter_of(job), True
        chunks.append(Chunk(job, job.adapter, tuple(job.waiting[:count])))
        del job.waiting[:count]
        if job.waiting:
            break
        queue.popleft()
    return chunks


def _piece(job: Job, limits: Limits) -> int:
    """Rollouts of a job that start together: all that fit an empty batch, and one if none does."""
    few, many = 1, min(len(job.waiting), limits.rows)
    while few < many:
        middle = (few + many + 1) // 2
        few, many = (middle, many) if _Load().plus(job, middle).fits(limits) else (few, middle - 1)
    return few


def halved(limits: Limits, live: Sequence[Chunk], rows: int) -> int:
    """Tokens to allow after a batch like this was too much for the device."""
    load = _Load()
    for chunk in live:
        load = load.plus(chunk.job, 0)
    held = SharedCache.tokens_held(rows, load.longest_new, load.chunks, load.longest_prompt)
    return max(1, min(limits.tokens, held) // 2)
