"""The auditor: recomputes some groups of each sampler, and judges the sampler by all that it saw of it.

    group ─▶ refused? ─▶ chosen? ─▶ policy of its clock ─▶ forward pass (a thread) ─▶ evidence
                                                                                         │
        warned (told what is wrong, reloads) ◀── guilty, but it tells what it did ◀──────┤
        quarantined                          ◀── guilty, and hides it, or again    ◀─────┘

Who malfunctions reports the log-probabilities of what it did, so they disagree with the policy it claims; who
makes them agree although the tokens were not sampled so, hides something, and is not warned.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from typing import Protocol

import numpy as np

from protocol.arrays import IntArray
from protocol.clock import GENESIS, VectorClock
from protocol.codec import Signed
from protocol.errors import MessageTooLarge, StoreError
from protocol.limits import INLINE_BYTES_MAX
from protocol.messages import Finding, Rollout, RolloutGroup, SamplingParams, Standing, Task
from protocol.ports import AdapterStore, Offload
from protocol.reasons import DeadReason, Judgement
from roles.policy.compose import Factors
from roles.policy.policies import Policies, PolicyVersion
from roles.ring import Ring
from roles.standings import Standings
from roles.verifier.audit_agreement import differences, tolerance_of
from roles.verifier.audit_copies import Copies
from roles.verifier.audit_evidence import chosen_rollouts, claimed_logprobs, evidence_of
from roles.verifier.audit_facts import TokenFacts
from roles.verifier.audit_stream import Chosen, Evidence, Stream, faults_of

AUDITED_KEPT = 4096
"""Groups whose findings are remembered: a redelivery is the same group once more."""
STREAMS_MAX = 4096
"""Samplers that are remembered; the least recently seen is forgotten."""
OLDER = (1, 2, 5)
"""Updates back that a sampler may have stopped at: looked at to tell it so."""


class Recompute(Protocol):
    """What a policy gives for completions; ``torch_recompute.py`` in a node. Heavy: called off the loop."""

    def facts(
        self,
        policy: str,
        factors: Factors,
        prompt: IntArray,
        completions: list[IntArray],
        params: SamplingParams,
    ) -> list[TokenFacts]:
        """Facts of each completion, in order."""
        ...


class PolicyAuditor:
    """Implements ``roles.verifier.verifier.Auditor``."""

    def __init__(
        self,
        ring: Ring,
        store: AdapterStore,
        recompute: Recompute,
        standings: Standings,
        *,
        offload: Offload,
        secret: bytes | None = None,
    ) -> None:
        """``offload`` runs forward passes, one at a time. ``secret`` decides what is audited; by default
        nobody knows it."""
        self._ring = ring
        self._spec = ring.spec.audit
        self._policies = Policies(ring, store, offload)
        self._recompute = recompute
        self._standings = standings
        self._offload = offload
        secret = secret or secrets.token_bytes(32)
        self._chosen = Chosen(secret, self._spec)
        self._rng = np.random.default_rng(list(secret))
        self._streams: OrderedDict[str, Stream] = OrderedDict()
        self._told: dict[str, float] = {}
        """When this verifier learned of a warning, by key, in monotonic seconds."""
        self._lifted: dict[str, float] = {}
        self._found: OrderedDict[str, str | None] = OrderedDict()
        """Findings by sha256 of the group's frame."""
        self._held: PolicyVersion | None = None
        self._copies = Copies()
        self._ready = asyncio.Event()
        self.audited = 0
        self.skipped = 0
        """Groups that were chosen but whose policy the store does not have any more."""

    async def run(self) -> None:
        """Learn of genesis, then follow judgements for ever, and say again those that a broker lost."""
        await self._policies.start()
        self._ready.set()
        async for _ in self._standings.watch():
            await self._standings.say_again()

    def refusal(self, public_key: str) -> str | None:
        """Why nothing signed by a key is used, or None."""
        return self._standings.refusal(public_key)

    async def audit(self, group: RolloutGroup, task: Task, signed: Signed) -> tuple[DeadReason, str] | None:
        """What is wrong with a group, or None. Judges its sampler on the way.

        Groups of one sampler come one after the other: whether one is audited depends on what was found in
        those before it, or a newcomer that sends many at once would have only the first ones looked at.
        """
        await self._ready.wait()
        async with self._stream(signed.signer).in_turn:
            if refusal := self.refusal(signed.signer):
                return DeadReason.QUARANTINED, refusal
            finding = await self._finding(group, task, signed)
        return (DeadReason.AUDIT_FAILED, finding) if finding else None

    async def _finding(self, group: RolloutGroup, task: Task, signed: Signed) -> str | None:
        tolerance = tolerance_of(group.engine, self._spec.tolerances)
        stream = self._stream(signed.signer)
        if tolerance is None:
            known = ", ".join(self._spec.tolerances)
            reason = f"engine {group.engine} is none that this run audits ({known}); start another one"
            await self._warn_once(group, signed, stream, reason)
            return reason
        content = hashlib.sha256(signed.frame).hexdigest()
        if content in self._found:
            return self._found[content]
        excused = self._in_grace(signed.signer)
        if not (excused or stream.wants()):
            return None
        policy = await self._policy(group.clock)
        if policy is None:
            self.skipped += 1
            return None
        rollouts = chosen_rollouts(group, len(task.prompt_token_ids), self._spec.tokens_max, self._rng)
        facts = await self._facts(policy, task, rollouts)
        evidence = evidence_of(task, rollouts, facts, tolerance, self._copies, self._rng)
        self.audited += 1
        faults = tuple(faults_of(evidence)) if excused else stream.add(evidence)
        if faults or stream.suspicious:
            stream.findings.append(_finding(group, signed, evidence, stream))
        if stream.guilty_of is not None and not excused:
            await self._judge(group, task, signed, stream, evidence, rollouts)
        finding = "; ".join(faults) or None
        self._remember(content, finding)
        return finding

    def _stream(self, key: str) -> Stream:
        """What is remembered of a key; begun again after a person has lifted its quarantine."""
        stream = self._streams.setdefault(key, Stream(key, self._chosen))
        self._streams.move_to_end(key)
        while len(self._streams) > STREAMS_MAX:
            self._streams.popitem(last=False)
        standing = self._standings.of(key)
        if standing is None:
            return stream
        if standing.judgement is Judgement.LIFTED and self._lifted.get(key) != standing.at:
            self._lifted[key] = standing.at
            stream.begin()
        if standing.judgement is Judgement.WARNED and key not in self._told:
            self._told[key] = self._ring.clock.monotonic()
            stream.begin()
        if standing.judgement is not Judgement.WARNED:
            self._told.pop(key, None)
        return stream

    def _in_grace(self, key: str) -> bool:
        """Whether a warned sampler may still send what it had begun before it was told."""
        told = self._told.get(key)
        return told is not None and self._ring.clock.monotonic() - told < self._spec.grace_s

    async def _policy(self, clock: VectorClock) -> PolicyVersion | None:
        """The claimed policy; None if it cannot be had, which the learner will find, too."""
        held = self._held
        if held is not None and held.clock == clock:
            return held
        try:
            if not clock <= self._policies.newest:
                await self._ring.persist(self._policies.read_heads)
            self._held = held = await self._policies.at(clock)
            return held
        except StoreError as exc:
            self._ring.log.warning("audit_skipped", clock=clock.text, error=str(exc) or type(exc).__name__)
            return None

    async def _facts(self, policy: PolicyVersion, task: Task, rollouts: list[Rollout]) -> list[TokenFacts]:
        """Facts of the tokens that were sampled; what tools replied is context like the prompt."""
        completions = [rollout.token_ids for rollout in rollouts]
        facts = await self._offload(
            lambda: self._recompute.facts(
                policy.name, policy.factors, task.prompt_token_ids, completions, task.params
            )
        )
        return [one.of(rollout.sampled) for one, rollout in zip(facts, rollouts, strict=True)]

    async def _judge(
        self,
        group: RolloutGroup,
        task: Task,
        signed: Signed,
        stream: Stream,
        evidence: Evidence,
        rollouts: list[Rollout],
    ) -> None:
        reason = stream.guilty_of or ""
        standing = self._standings.of(signed.signer)
        told = standing is not None and standing.judgement is Judgement.WARNED
        if set(evidence.flags) - {"seed"} and not told:
            reason += await self._diagnosis(group, task, rollouts)
            await self._write(group, signed, stream, Judgement.WARNED, reason)
        else:
            await self._write(group, signed, stream, Judgement.QUARANTINED, reason)

    async def _diagnosis(self, group: RolloutGroup, task: Task, rollouts: list[Rollout]) -> str:
        """Which other policy of this run a sampler reports the log-probabilities of, if any."""
        claimed = [claimed_logprobs(rollout) for rollout in rollouts[:2]]
        best, least = "", np.inf
        own = None
        for name, clock in {"": group.clock, **_older(group.clock)}.items():
            policy = await self._policy(clock)
            if policy is None:
                continue
            facts = await self._facts(policy, task, rollouts[:2])
            median = differences(claimed, facts)["median"]
            own = median if not name else own
            if median < least:
                best, least = name, median
        if best and own is not None and least < own / 4:
            return f"; they are those of {best}: it must load the newest policy"
        return f"; by {own:.2g} nats in the median: compare its model, dtype and version" if own else ""

    async def _warn_once(self, group: RolloutGroup, signed: Signed, stream: Stream, reason: str) -> None:
        standing = self._standings.of(signed.signer)
        if standing is None or standing.reason != reason:
            await self._write(group, signed, stream, Judgement.WARNED, reason)

    async def _write(
        self, group: RolloutGroup, signed: Signed, stream: Stream, judgement: Judgement, reason: str
    ) -> None:
        standing = Standing(
            run=group.run,
            node=group.sampler,
            public_key=signed.signer,
            judgement=judgement,
            judge=self._ring.identity.node,
            at=self._ring.clock.wall(),
            reason=reason[:500],
            audited=stream.audited,
            findings=tuple(stream.findings),
        )
        try:
            await self._standings.judge(standing)
        except MessageTooLarge:
            bare = tuple(f.model_copy(update={"group": np.zeros(0, np.uint8)}) for f in standing.findings)
            await self._standings.judge(standing.model_copy(update={"findings": bare}))
        self._stream(signed.signer)
        await self._ring.tell(f"sampler_{judgement.value}", sampler=group.sampler, reason=reason)

    def _remember(self, content: str, finding: str | None) -> None:
        self._found[content] = finding
        while len(self._found) > AUDITED_KEPT:
            self._found.popitem(last=False)


def _finding(group: RolloutGroup, signed: Signed, evidence: Evidence, stream: Stream) -> Finding:
    share = INLINE_BYTES_MAX // stream.findings.maxlen if stream.findings.maxlen else 0
    kept = signed.frame if len(signed.frame) <= share else b""
    numbers = {**evidence.numbers, **stream.evidence}
    return Finding(
        group_id=group.group_id,
        engine=group.engine,
        clock=group.clock,
        flags=evidence.flags,
        numbers={name: float(np.clip(value, -1e9, 1e9)) for name, value in numbers.items()},
        group=np.frombuffer(kept, np.uint8),
    )


def _older(clock: VectorClock) -> dict[str, VectorClock]:
    """Policies that a sampler may be stuck at, by their names for a person."""
    counts = dict(clock)
    older: dict[str, VectorClock] = {}
    if clock != GENESIS:
        for back in OLDER:
            past = VectorClock.of({who: max(0, n - back) for who, n in counts.items() if n > back})
            if past != GENESIS:
                older[f"an adapter {back} updates older"] = past
        older["the base model without an adapter"] = GENESIS
    return older
