"""An engine without a model, for simulations and tests: same checks, same rules, made-up tokens.

The next token's distribution is drawn once per policy and prompt from a seeded generator, so that
equal requests give equal rollouts on every machine, and another policy gives others. Time passes
only on the clock it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import EngineError
from protocol.messages import FinishReason, Rollout, SamplingParams
from protocol.ports import Clock
from roles.policy.compose import Factors, factors_digest
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.residents import Residents, check_request
from roles.streams import rollout_stream

Logits = NDArray[np.float64]


class FakeEngine:
    """Implements ``Engine``. ``shapes`` has the tensors every policy must have.

    ``seconds_per_token`` is what one decoding step of a group takes; ``groups_max`` groups run at once
    and others wait. ``calls`` counts every call by method.
    """

    def __init__(
        self,
        shapes: Factors,
        clock: Clock,
        *,
        eos_ids: Sequence[int] = (2,),
        vocab_size: int = 16,
        context_tokens: int = 64,
        groups_max: int = 4,
        seconds_per_token: float = 0.01,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self._clock = clock
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._groups_max = groups_max
        self._seconds_per_token = seconds_per_token
        self._residents: Residents[tuple[str, str]] = Residents(
            shapes, lambda name, factors: (name, factors_digest(factors))
        )
        self._logits: dict[tuple[str, bytes], Logits] = {}
        """Like a prefix cache, keyed by policy name and prompt: sound only while names are never rebound."""
        self._slots = asyncio.Semaphore(groups_max)
        self._running: dict[asyncio.Future[None], tuple[SampleRequest, str]] = {}
        """By what fails it early."""
        self._concluded = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def name(self) -> str:
        """Engine and version."""
        return "fake"

    @property
    def groups_max(self) -> int:
        """Requests that run at once."""
        return self._groups_max

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Check and remember a policy. Raises EngineError like any engine."""
        self.calls["load_policy"] += 1
        self._residents.load(name, factors, newest=newest)

    async def unload_policy(self, name: str) -> None:
        """Forget a policy; requests that already have it finish under it."""
        self.calls["unload_policy"] += 1
        self._residents.unload(name)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Make up rollouts and let their time pass."""
        self.calls["sample"] += 1
        check_request(request, vocab_size=self._vocab_size, context_tokens=self._context_tokens)
        policy = self._residents.get(request.policy)
        named = None if request.policy is None else policy
        return await self._unless_closed(self._generate(request, named, self._concluded))

    async def abandon(self, policy: str) -> None:
        """Fail what runs under ``policy`` without having asked for it by name."""
        self.calls["abandon"] += 1
        for early, (request, name) in tuple(self._running.items()):
            if request.policy is None and name == policy and not early.done():
                early.set_exception(EngineError(f"policy {policy} has become too old for anybody"))

    async def conclude(self) -> None:
        """Fail what runs and what waits."""
        self.calls["conclude"] += 1
        for early in tuple(self._running):
            if not early.done():
                early.set_exception(EngineError("the engine concludes its work"))
        self._concluded.set()
        self._concluded = asyncio.Event()

    async def close(self) -> None:
        """Fail what waits or runs."""
        self.calls["close"] += 1
        self._closed.set()

    async def _generate(
        self, request: SampleRequest, policy: tuple[str, str] | None, concluded: asyncio.Event
    ) -> Sampled:
        async with self._slot(concluded):
            policy_name, digest = policy or self._residents.get(None)
            logprobs = truncated_logprobs(self._next_token(policy_name, digest, request), request.params)
            rollouts = [self._rollout(logprobs, request, index) for index in range(request.count)]
            took_s = [len(rollout.token_ids) * self._seconds_per_token for rollout in rollouts]
            passed_s = min(request.deadline_s, max(took_s))
            await self._pass_time(passed_s, request, policy_name)
            finished = tuple(r for r, s in zip(rollouts, took_s, strict=True) if s <= passed_s)
            return Sampled(policy_name, finished, passed_s, self._seconds_per_token, 0.0)

    @contextlib.asynccontextmanager
    async def _slot(self, concluded: asyncio.Event) -> AsyncIterator[None]:
        """A place among the groups that run. Raises EngineError if the engine concludes first."""
        place = asyncio.ensure_future(self._slots.acquire())
        waiting = asyncio.ensure_future(concluded.wait())
        try:
            await asyncio.wait({place, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if concluded.is_set():
                raise EngineError("the engine concludes its work")
            yield
        finally:
            waiting.cancel()
            if place.done() and not place.cancelled():
                self._slots.release()
            place.cancel()

    async def _pass_time(self, seconds: float, request: SampleRequest, policy: str) -> None:
        """Sleep. Raises EngineError if somebody abandons or concludes the request first."""
        early: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asleep = asyncio.ensure_future(self._clock.sleep(seconds))
        both: set[asyncio.Future[Any]] = {early, asleep}
        self._running[early] = request, policy
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if early.done():
                early.result()
        finally:
            del self._running[early]
            asleep.cancel()

    def _next_token(self, policy_name: str, digest: str, request: SampleRequest) -> Logits:
        prompt = request.prompt_token_ids.tobytes()
        key = (policy_name, prompt)
        if key not in self._logits:
            self._logits[key] = made_up_logits(digest, prompt, self._vocab_size)
        return self._logits[key]

    def _rollout(self, logprobs: Logits, request: SampleRequest, index: int) -> Rollout:
        limit = request.params.max_new_tokens
        cdf = np.exp(logprobs).cumsum()
        uniforms = rollout_stream(request.seed, index).random(limit)
        last = int(np.searchsorted(cdf, cdf[-1]))
        tokens = np.minimum(np.searchsorted(cdf, uniforms * cdf[-1], side="right"), last)
        ends = np.flatnonzero(np.isin(tokens, list(self._eos_ids)))
        if ends.size:
            tokens = tokens[: ends[0] + 1]
        return Rollout(
            index=index,
            token_ids=tokens.astype(np.int32),
            sampler_logprobs=np.minimum(logprobs[tokens], 0.0).astype(np.float32),
            finish=FinishReason.STOP if ends.size else FinishReason.LENGTH,
        )

    async def _unless_closed(self, work: Coroutine[Any, Any, Sampled]) -> Sampled:
        generation = asyncio.ensure_future(work)
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({generation, closed}, return_when=asyncio.FIRST_COMPLETED)
            if self._closed.is_set():
                raise EngineError("the engine is closed")
            return generation.result()
        finally:
            generation.cancel()
            closed.cancel()


def made_up_logits(digest: str, prompt: bytes, vocab_size: int) -> Logits:
    """The next token's logits [V] after any beginning of ``prompt``, under the factors of a digest."""
    seed = [int(digest[:16], 16), zlib.crc32(prompt)]
    return np.random.default_rng(seed).normal(size=vocab_size)


def truncated_logprobs(logits: Logits, params: SamplingParams) -> Logits:
    """Log-probabilities [V] after temperature, min-p, top-k and top-p; -inf outside."""
    scaled = logits / params.temperature
    order = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(scaled - scaled.max())
    keep = probabilities >= params.min_p
    if params.top_k:
        keep &= scaled >= scaled[order[min(params.top_k, len(order)) - 1]]
    kept = np.where(keep, probabilities, 0.0)
    if params.top_p < 1:
        mass = kept[order] / kept.sum()
        above = mass.cumsum() - mass
        keep[order[above >= params.top_p]] = False
        kept = np.where(keep, probabilities, 0.0)
    logprobs = np.full_like(scaled, -np.inf)
    logprobs[keep] = np.log(kept[keep] / kept.sum())
    return logprobs
