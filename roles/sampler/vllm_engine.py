"""The vLLM engine: groups of rollouts as completions of one or more vLLM servers.

    sample() ──▶ waits for room ──▶ policy is fixed ──▶ adapter is there ──▶ one completion a rollout
                 (vllm_replicas)                        (vllm_adapters)      (vllm_completion)

A rollout is a request of its own: it is batched, finished and cancelled by itself, and the server's prefix
cache makes the prompt one prefill for all of a group. A policy is loaded before it becomes the newest, and
unloaded after its last rollout. What a dying server had in hand fails, so that its tasks go back to the
queue; what waits here waits until a server lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from protocol.errors import EngineError
from protocol.messages import Rollout
from protocol.ports import Clock
from roles.policy.compose import Factors
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.residents import Residents, check_request
from roles.sampler.vllm_adapters import AdapterFiles, Placed
from roles.sampler.vllm_client import NOT_FOUND, ServerLost, ServerRefused
from roles.sampler.vllm_completion import completion_body, read_completion
from roles.sampler.vllm_replicas import Replica, Replicas
from roles.sampler.vllm_server import Life

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, as every request is checked against it."""

    name: str
    """Engine and version, for provenance: ``vllm-0.32.0-bfloat16``."""
    shapes: Factors
    """Names and shapes of the factors of every policy."""
    eos_ids: frozenset[int]
    vocab_size: int
    context_tokens: int


@dataclass(eq=False, slots=True)
class Call:
    """What somebody waits for, from its arrival to its end."""

    request: SampleRequest | None = None
    """None: a policy that waits for a server."""
    policy: str | None = None
    """The policy that it runs under; None while it waits."""
    works: Sequence[asyncio.Future[Rollout]] = ()
    """Its rollouts, once it runs."""
    why: str = ""
    """Why it was ended early."""

    @property
    def whole(self) -> bool:
        """Whether it is about to end by itself."""
        return bool(self.works) and all(work.done() for work in self.works)


class VllmEngine:
    """Implements ``Engine``. Its servers are open."""

    def __init__(self, served: Served, replicas: Replicas, files: AdapterFiles, clock: Clock) -> None:
        self._served = served
        self.replicas = replicas
        self._clock = clock
        self._files = files
        self._residents: Residents[Placed] = Residents(served.shapes, files.place)
        self._calls: dict[asyncio.Task[Any], Call] = {}
        self._closed = False
        self._chores: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """Engine and version."""
        return self._served.name

    @property
    def groups_max(self) -> int:
        """Requests of one rollout that all servers can decode together."""
        return self.replicas.rows_max * len(self.replicas.all)

    @property
    def shapes(self) -> Factors:
        """Names and shapes of the factors that every policy must have."""
        return self._served.shapes

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Load a policy into every server that lives; others load it when they do.

        Raises EngineError on any fault, and the previous policy stays the newest.
        """
        await asyncio.to_thread(self._residents.load, name, factors, newest=False)
        policy = self._residents.get(name)
        with self._used(policy):
            try:
                for replica in await self._answer(Call(), self.replicas.any_living()):
                    await self._preload(replica, policy)
            except EngineError:
                await self.unload_policy(name)
                raise
            if newest:
                self._residents.promote(name)

    async def unload_policy(self, name: str) -> None:
        """Forget a policy; requests that already have it finish under it."""
        try:
            policy = self._residents.get(name)
        except EngineError:
            return
        self._residents.unload(name)
        policy.retired = True
        self._forget_if_over(policy)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Generate a group on one server. Cancelling closes its requests, and the server aborts them."""
        served = self._served
        check_request(request, vocab_size=served.vocab_size, context_tokens=served.context_tokens)
        policy = self._residents.get(request.policy)
        call = Call(request)
        if request.policy is None:
            return await self._answer(call, self._serve(call, request, None))
        with self._used(policy):
            return await self._answer(call, self._serve(call, request, policy))

    async def abandon(self, policy: str) -> None:
        """Fail what runs under ``policy`` without having asked for it by name; its servers abort it."""
        self._end(
            f"policy {policy} has become too old for anybody",
            lambda call: call.policy == policy and call.request is not None and call.request.policy is None,
        )

    async def conclude(self) -> None:
        """Fail every request that is not whole."""
        self._end("the engine concludes its work", lambda call: call.request is not None)

    async def close(self) -> None:
        """Fail what waits or runs, unload what is loaded, and end the servers that were started here."""
        self._closed = True
        self._end("the engine is closed", lambda _: True)
        await self.settled()
        for replica in self.replicas.all:
            if replica.server.attached and replica.server.life is not None:
                await self._drop(replica, self._residents.all())
            await replica.server.close()
            await replica.client.close()
        await asyncio.to_thread(self._files.close)

    async def settled(self) -> None:
        """Wait until what is being unloaded is unloaded."""
        while self._chores:
            await asyncio.wait(self._chores)

    async def _answer(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        """Do the work of a call. Raises EngineError if somebody ends it early."""
        task = asyncio.ensure_future(work)
        self._calls[task] = call
        if self._closed:
            self._end("the engine is closed", lambda other: other is call)
        try:
            return await task
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if call.why and not (waiter and waiter.cancelling()):
                raise EngineError(call.why) from None
            raise
        finally:
            del self._calls[task]

    def _end(self, why: str, which: Callable[[Call], bool]) -> None:
        """End calls early, unless they are whole."""
        for task, call in self._calls.items():
            if which(call) and not call.whole:
                call.why = call.why or why
                task.cancel()

    async def _serve(self, call: Call, request: SampleRequest, policy: Placed | None) -> Sampled:
        replica = await self.replicas.take(request.count)
        try:
            policy = policy or self._residents.get(None)
            call.policy = policy.name
            with self._used(policy):
                return await self._generate(call, replica, policy, request)
        finally:
            self.replicas.give(replica, request.count)

    async def _generate(
        self, call: Call, replica: Replica, policy: Placed, request: SampleRequest
    ) -> Sampled:
        life = replica.server.life
        if life is None:
            raise ServerLost(f"vLLM at {replica.client.url} was lost a moment ago")
        started = self._clock.monotonic()
        call.works = [
            asyncio.ensure_future(self._rollout(replica, life, policy, request, index))
            for index in range(request.count)
        ]
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._clock.sleep(request.deadline_s)),
            asyncio.ensure_future(life.lost.wait()),
        ]
        try:
            await _any_of(ends, call.works)
            if life.lost.is_set() and not call.whole:
                raise ServerLost(f"vLLM at {replica.client.url} was lost: {life.why}")
            rollouts = tuple(work.result() for work in call.works if work.done())
        except ServerLost:
            replica.server.doubt(life)
            raise
        except ServerRefused as exc:
            if exc.status == NOT_FOUND:  # it has no such adapter any more
                replica.server.forgot(life)
            raise
        finally:
            _cancel(call.works, ends)
        if not rollouts:
            replica.server.doubt(life, stalled=True)
        return Sampled(policy.name, rollouts, max(0.0, self._clock.monotonic() - started))

    async def _rollout(
        self, replica: Replica, life: Life, policy: Placed, request: SampleRequest, index: int
    ) -> Rollout:
        await replica.adapters.ensure(policy, life)
        eos_ids = self._served.eos_ids
        reply = await replica.client.complete(completion_body(request, index, policy.served, eos_ids))
        return read_completion(reply, request, index, policy.served, eos_ids)

    async def _preload(self, replica: Replica, policy: Placed) -> None:
        """Load into one server; one that dies meanwhile loads it later, when it is asked for."""
        life = replica.server.life
        if life is None:
            return
        try:
            await replica.adapters.ensure(policy, life)
        except ServerLost:
            replica.server.doubt(life)

    @contextmanager
    def _used(self, policy: Placed) -> Iterator[None]:
        """Keep a policy loaded while the body runs."""
        policy.users += 1
        try:
            yield
        finally:
            policy.users -= 1
            self._forget_if_over(policy)

    def _forget_if_over(self, policy: Placed) -> None:
        if policy.over and not self._closed:
            chore = asyncio.ensure_future(self._forget(policy))
            self._chores.add(chore)
            chore.add_done_callback(self._chores.discard)

    async def _forget(self, policy: Placed) -> None:
        """Unload everywhere, then delete the files: a server may read them again while it serves them."""
        for replica in self.replicas.all:
            await self._drop(replica, [policy])
        await asyncio.to_thread(self._files.discard, policy)

    async def _drop(self, replica: Replica, policies: Sequence[Placed]) -> None:
        for policy in policies:
            try:
                await replica.adapters.drop(policy)
            except EngineError as exc:
                log.warning("policy_not_unloaded", policy=policy.name, error=str(exc))


async def _any_of(ends: Collection[asyncio.Future[Any]], works: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until one of ``ends`` or all of ``works`` are done. Raises what a work raised."""
    pending = set(works)
    while pending and not any(end.done() for end in ends):
        await asyncio.wait({*pending, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for work in [work for work in pending if work.done()]:
            pending.discard(work)
            work.result()


def _cancel(*futures: Collection[asyncio.Future[Any]]) -> None:
    """End what still runs; what it raises on the way concerns nobody."""
    for future in (future for some in futures for future in some):
        if not future.done():
            future.cancel()
        elif not future.cancelled():
            future.exception()
