"""The verifier's loop: checks each group's structure, scores its completions, passes it on with verdicts.

    queue "rollout" ─▶ structure ─▶ audit ─▶ rewards (worker pool) ─▶ queue "verified"
                           └──────────┴─▶ dead letter, with the reason

Answers are looked up here, by ``(split, row)``, and go nowhere else. Every delivery is a task of its own: a
group whose completions hang costs its own time limit and holds up no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from protocol.codec import Signed, decode
from protocol.errors import DecodeError, MessageTooLarge
from protocol.messages import Rollout, RolloutGroup, Task, Verdict, VerifiedGroup
from protocol.ports import Delivery
from protocol.reasons import DeadReason, StructureFault
from protocol.subjects import Queue
from roles.ring import Ring
from roles.tasks.taskset import Row
from roles.turns.messages import messages_of
from roles.turns.spans import spans_of
from roles.verifier.checks import Rules, signer_fault, structure_fault
from roles.verifier.rewards.reward import Item
from roles.verifier.rewards.scorer import Scored
from roles.verifier.turn_checks import Fault

QUEUES: Mapping[Queue, Queue] = {Queue.ROLLOUT: Queue.VERIFIED, Queue.EVAL_ROLLOUT: Queue.EVAL_VERIFIED}
"""Which queue a group comes from, and where it goes on."""

CREDIT = 64
"""Groups of one queue in hand at once: a worker pool stays busy while dozens of them wait for a hanging
answer's time limit. Bounds the verifier's memory, and what is delivered again when it dies."""


class TextDecoder(Protocol):
    """Token ids to the text that rewards see."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        ...


class GroupScorer(Protocol):
    """Rewards of a group's completions; ``rewards/scorer.py`` in a node."""

    async def score(self, items: Sequence[Item]) -> list[Scored]:
        """One result per item, in order."""
        ...


class Auditor(Protocol):
    """A look behind a sound structure: did this policy sample these tokens?"""

    def refusal(self, public_key: str) -> str | None:
        """Why nothing that a key signs is used, in one line, or None."""
        ...

    async def audit(self, group: RolloutGroup, task: Task, signed: Signed) -> tuple[DeadReason, str] | None:
        """What is wrong, and in one line why; or None. ``signed`` is the group as its sampler signed it."""
        ...


def _no_key_known(_node: str) -> str | None:
    return None


class Verifier:
    """One verifier of a run."""

    def __init__(
        self,
        ring: Ring,
        rules: Rules,
        decoder: TextDecoder,
        scorer: GroupScorer,
        *,
        trust: Callable[[str], str | None] = _no_key_known,
        auditor: Auditor | None = None,
        drain_s: float = 10.0,
    ) -> None:
        """``trust`` gives a node's known public key; ``drain_s`` bounds the wait for groups in hand."""
        self._ring = ring
        self._rules = rules
        self._decoder = decoder
        self._scorer = scorer
        self._trust = trust
        self._auditor = auditor
        self._drain_s = drain_s
        self.busy = 0
        """Groups in hand."""
        self.verified = 0
        self.rejected = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Verify until ``stop``, then finish what is in hand within the drain time and release the rest."""
        async with asyncio.TaskGroup() as group:
            for queue in QUEUES:
                taking = self._ring.take_each(queue, CREDIT, self._handle, stop, self._drain_s)
                group.create_task(taking)

    async def _handle(self, delivery: Delivery, queue: Queue) -> None:
        self.busy += 1
        try:
            async with self._ring.alive(delivery):
                await self._verify(delivery, queue)
        except asyncio.CancelledError:
            await delivery.release()
            raise
        finally:
            self.busy -= 1

    async def _verify(self, delivery: Delivery, queue: Queue) -> None:
        received = await self._ring.receive(delivery, queue, RolloutGroup)
        if received is None:
            self.rejected += 1
            return
        group, signed = received
        if self._auditor and (refusal := self._auditor.refusal(signed.signer)):
            await self._reject(delivery, queue, DeadReason.QUARANTINED, refusal, group)
            return
        try:
            task_signed = decode(group.task.tobytes())
            task = task_signed.expect(Task)
        except DecodeError as exc:
            await self._reject(delivery, queue, DeadReason.UNDECODABLE, f"the task inside: {exc}", group)
            return
        fault = self._fault(queue, group, task, signed, task_signed)
        if fault is not None:
            detail = f"{fault[0].value}: {fault[1]}"
            await self._reject(delivery, queue, DeadReason.BAD_STRUCTURE, detail, group)
            return
        if self._auditor and (finding := await self._auditor.audit(group, task, signed)):
            await self._reject(delivery, queue, *finding, group)
            return
        await self._score(delivery, queue, group, task, signed)

    def _fault(
        self, queue: Queue, group: RolloutGroup, task: Task, signed: Signed, task_signed: Signed
    ) -> Fault | None:
        if (task.split == "train") != (queue is Queue.ROLLOUT):
            return StructureFault.TASK_UNKNOWN, f"a {task.split} row in queue {queue.value}"
        return signer_fault(
            group, task_signer=task_signed.signer, group_signer=signed.signer, trust=self._trust
        ) or structure_fault(group, task, rules=self._rules)

    async def _score(
        self, delivery: Delivery, queue: Queue, group: RolloutGroup, task: Task, signed: Signed
    ) -> None:
        row = self._rules.tasks.row(task.split, task.row)
        assert row is not None, "structure_fault looks the row up"
        began = self._ring.clock.monotonic()
        scored = await self._scorer.score([self._item(rollout, row) for rollout in group.rollouts])
        scoring_s = self._ring.clock.monotonic() - began
        verified = VerifiedGroup(
            run=group.run,
            group_id=group.group_id,
            group=np.frombuffer(signed.frame, np.uint8),
            verifier=self._ring.identity.node,
            verdicts=tuple(_verdict(r, s) for r, s in zip(group.rollouts, scored, strict=True)),
            scoring_s=scoring_s,
        )
        try:
            await self._ring.send(QUEUES[queue], verified, f"verified:{group.group_id}")
        except MessageTooLarge as exc:
            await self._reject(
                delivery, queue, DeadReason.BAD_STRUCTURE, f"too large with verdicts: {exc}", group
            )
            return
        await self._ring.settle(delivery)
        self.verified += 1
        await self._tell(group, row, scored, scoring_s)

    def _item(self, rollout: Rollout, row: Row) -> Item:
        """What rewards see: the text of the last turn, and where there are several, all of them."""
        last = spans_of(rollout.sampled)[-1]
        completion = self._decoder.decode(rollout.token_ids[last.tokens].tolist())
        dialogue = self._rules.dialogue
        conversation = messages_of(rollout, dialogue) if dialogue else ()
        return Item(completion, row.answer, row.prompt, row.metadata, conversation)

    async def _reject(
        self, delivery: Delivery, queue: Queue, reason: DeadReason, detail: str, group: RolloutGroup
    ) -> None:
        """Take a group out of the ring and account for it."""
        await self._ring.bury(delivery, queue, reason, f"{group.sampler}: {detail}", group.group_id)
        self.rejected += 1
        await self._ring.tell("group_rejected", group=group.group_id, sampler=group.sampler, reason=detail)

    async def _tell(self, group: RolloutGroup, row: Row, scored: Sequence[Scored], scoring_s: float) -> None:
        rewards = [one.reward for one in scored if one.reward is not None]
        for one in scored:
            if one.unscorable is not None:
                reason, note = one.unscorable.value, one.note
                self._ring.log.warning("rollout_unscorable", row=row.origin, reason=reason, note=note)
        await self._ring.tell(
            "group_verified",
            group=group.group_id,
            sampler=group.sampler,
            accepted=len(rewards),
            unscorable=len(scored) - len(rewards),
            reward_mean=_mean(rewards),
            seconds=scoring_s,
            **{f"rewards/{name}": _mean(values) for name, values in _by_reward(scored).items()},
        )


def _verdict(rollout: Rollout, scored: Scored) -> Verdict:
    return Verdict(
        index=rollout.index,
        reward=scored.reward,
        scores=scored.scores,
        unscorable=scored.unscorable,
        note=scored.note,
    )


def _by_reward(scored: Sequence[Scored]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for one in scored:
        for name, value in one.scores.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    return values


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
