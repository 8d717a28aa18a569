"""Samplers, honest and not, and verifiers that audit them, on a broker in memory under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from protocol.codec import decode_as, encode
from protocol.errors import OperatorError
from protocol.messages import Rollout, RolloutGroup, SamplingParams, Standing, VerifiedGroup
from protocol.reasons import DeadReason
from protocol.runspec import RunSpec
from protocol.subjects import Bucket, Queue, standing_key
from roles.learner.fake_policy import SHAPES
from roles.policy.compose import Factors
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.fake_engine import FakeEngine, made_up_logits, truncated_logprobs
from roles.sampler.sampler import Sampler
from roles.standings import Standings
from roles.tasks.taskset import Row, TaskSet
from roles.verifier.auditor import PolicyAuditor
from roles.verifier.checks import Rules
from roles.verifier.rewards.reward import Item
from roles.verifier.rewards.scorer import Scored
from roles.verifier.torch_fake_recompute import FakeRecompute
from roles.verifier.verifier import Verifier
from tests.build import a_runspec, a_task, an_identity
from tests.ground import Ground

T = TypeVar("T")
VOCABULARY = 16
TOKENS = 12
ROWS = [Row("sort 5 4", "45", "row 0")]
TOLERANCES = {"fake": {"median": 1e-5, "p90": 1e-5, "largest": 1e-4, "bias": 1e-5, "seed": 1e-4}}


def next_token(digest: str, prompt: bytes, params: SamplingParams) -> np.ndarray:
    """What a FakeEngine samples from."""
    return truncated_logprobs(made_up_logits(digest, prompt, VOCABULARY), params)


def a_run(**audit: Any) -> RunSpec:
    settings = {"rate": 0.1, "tolerances": TOLERANCES, "grace_s": 5.0} | audit
    return a_runspec(sampling={"group_size": 4, "max_new_tokens": TOKENS, "ack_wait_s": 3.0}, audit=settings)


class Forger(FakeEngine):
    """Samples at another temperature, and reports the log-probabilities that the task's would give."""

    async def sample(self, request: SampleRequest) -> Sampled:
        hot = SampleRequest(
            request.prompt_token_ids,
            request.count,
            request.params.model_copy(update={"temperature": 2.0}),
            request.seed,
            request.policy,
            request.deadline_s,
        )
        sampled = await super().sample(hot)
        _, digest = self._residents.get(sampled.policy)
        logprobs = next_token(digest, request.prompt_token_ids.tobytes(), request.params)
        rollouts = tuple(
            Rollout(
                index=r.index,
                token_ids=r.token_ids,
                sampler_logprobs=logprobs[r.token_ids].astype(np.float32),
                finish=r.finish,
            )
            for r in sampled.rollouts
        )
        return Sampled(sampled.policy, rollouts, sampled.generation_s)


class Stuck(FakeEngine):
    """Keeps serving the first weights it got, whatever it is told to load, until they are unloaded twice."""

    first: Factors | None = None
    cured = False

    async def load_policy(self, name: str, factors: Factors, *, newest: bool) -> None:
        self.first = self.first or factors
        await super().load_policy(name, factors if self.cured else self.first, newest=newest)

    async def unload_policy(self, name: str) -> None:
        if name == self._residents._newest:  # the one that is served: only a reload asks for that
            self.cured = True
            self._residents._digests.clear()
        await super().unload_policy(name)


class Scorer:
    async def score(self, items: Sequence[Item]) -> list[Scored]:
        return [Scored(1.0, {"exact": 1.0}) for _ in items]


class Text:
    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class Courtroom:
    """One run, with whom the test lets in."""

    def __init__(self, ground: Ground, genesis: Factors) -> None:
        self.ground, self.genesis = ground, genesis
        self.stop = asyncio.Event()
        self.auditors: dict[str, PolicyAuditor] = {}
        self.work: dict[str, asyncio.Task[None]] = {}
        self._tasks = 0

    @classmethod
    async def at(cls, directory: Path, **audit: Any) -> Courtroom:
        ground = Ground(directory, a_run(**audit))
        return cls(ground, await ground.claim_genesis())

    def sampler(self, node: str, engine: type[FakeEngine] = FakeEngine) -> FakeEngine:
        """Let a sampler in, also one that was thrown out before."""
        if node in self.work:
            self.work[f"{node} before"] = self.work[node]
        shapes = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        made = engine(shapes, self.ground.clock, vocab_size=VOCABULARY, seconds_per_token=0.01)
        ring = self.ground.ring(node, role="sampler")
        sampler = Sampler(ring, self.ground.store(), made, self.ground.offload)
        self.work[node] = asyncio.create_task(sampler.run(self.stop))
        return made

    def verifier(self, node: str, audit_s: float = 0.0) -> PolicyAuditor:
        """Let a verifier in whose forward passes take ``audit_s`` each."""

        async def slowly(work: Callable[[], T]) -> T:
            await self.ground.clock.sleep(audit_s)
            return await self.ground.offload(work)

        ring = self.ground.ring(node, role="verifier")
        auditor = PolicyAuditor(
            ring,
            self.ground.store(),
            FakeRecompute(next_token),
            Standings(ring),
            offload=slowly if audit_s else self.ground.offload,
            secret=node.encode(),
        )
        rules = Rules(frozenset({2}), VOCABULARY, TaskSet(ROWS, ROWS, [], "d"))
        verifier = Verifier(ring, rules, Text(), Scorer(), auditor=auditor)
        self.auditors[node] = auditor
        self.work[f"{node} audits"] = asyncio.create_task(auditor.run())
        self.work[node] = asyncio.create_task(verifier.run(self.stop))
        return auditor

    async def groups(self, count: int, every_s: float = 0.3) -> None:
        """Issue tasks one after the other, and give each its time."""
        params = SamplingParams(max_new_tokens=TOKENS)
        for _ in range(count):
            number, self._tasks = self._tasks, self._tasks + 1
            prompt = [1, 3 + number % 12, 3 + number // 12 % 12]
            task = a_task(
                group_id=f"learner-1.{number}",
                prompt_token_ids=prompt,
                group_size=4,
                params=params,
                seed=number,
            )
            await self.ground.bus().publish(Queue.TASK, encode(task, an_identity()), f"task:{number}")
            await self.ground.clock.sleep(every_s)

    def standing(self, node: str) -> Standing | None:
        """What the broker keeps of a node's key."""
        entry = self.ground.run.buckets[Bucket.RUN].get(standing_key(an_identity(node).public_key))
        return decode_as(entry.value, Standing) if entry else None

    def judged(self, node: str) -> Standing:
        """The same of a node that was judged."""
        standing = self.standing(node)
        assert standing is not None, f"nobody judged {node}"
        return standing

    @property
    def verified(self) -> list[VerifiedGroup]:
        """What went on to learners."""
        waiting = self.ground.run.queues[Queue.VERIFIED]._waiting
        return [decode_as(message.data, VerifiedGroup) for message in waiting]

    def went_on(self, node: str) -> list[str]:
        """Group ids of a sampler that went on."""
        groups = [decode_as(one.group.tobytes(), RolloutGroup) for one in self.verified]
        return [group.group_id for group in groups if group.sampler == node]

    def buried(self, reason: DeadReason) -> int:
        """Dead letters with a reason."""
        return sum(letter.reason is reason for letter in self.ground.dead)

    async def end(self) -> None:
        """Everybody leaves; whoever was thrown out is gone already."""
        self.stop.set()
        for name, work in self.work.items():
            if name.endswith("audits"):
                work.cancel()
        results = await asyncio.gather(*self.work.values(), return_exceptions=True)
        crashes = [r for r in results if isinstance(r, Exception) and not thrown_out(r)]
        if crashes:
            raise crashes[0]


def thrown_out(exc: BaseException) -> bool:
    """Whether a sampler ended because its key is quarantined."""
    leaves = exc.exceptions if isinstance(exc, BaseExceptionGroup) else [exc]
    return all(isinstance(leaf, OperatorError) and "quarantined" in str(leaf) for leaf in leaves)
