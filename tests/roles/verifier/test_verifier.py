"""The verifier's loop on a broker in memory: what goes on, and what is buried with which reason."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.codec import Signed, decode, encode
from protocol.messages import DeadLetter, RolloutGroup, Task
from protocol.reasons import DeadReason, Unscorable
from protocol.subjects import Queue
from tests.build import a_group, a_rollout, a_task, a_verified_group, an_identity
from tests.roles.verifier.stage import HeldScorer, Stage, wrong_and_right


async def test_a_sound_group_goes_on_with_a_verdict_per_rollout():
    stage = Stage()
    async with stage.verifier() as verifier:
        group = wrong_and_right()
        await stage.put(group)
        verified = await stage.out()
        assert [(v.index, v.reward, v.scores) for v in verified.verdicts] == [
            (0, 2.0, {"exact": 1.0}),
            (1, 0.0, {"exact": 0.0}),
        ]
        assert (verified.verifier, verified.group_id) == ("verifier-1", group.group_id)
        signed = decode(verified.group.tobytes())
        assert signed.message == group
        assert signed.signer == an_identity("sampler-1").public_key
    assert (await stage.hand.depth(Queue.ROLLOUT)).total == 0
    assert (verifier.verified, verifier.busy) == (1, 0)


async def test_an_evaluation_goes_to_its_own_queue():
    stage = Stage()
    async with stage.verifier():
        task = a_task(split="held_out", group_size=1, group_id="eval-1.0")
        await stage.put(a_group(task), Queue.EVAL_ROLLOUT)
        assert (await stage.out(Queue.EVAL_VERIFIED)).group_id == "eval-1.0"


async def test_a_row_without_an_answer_is_unscorable_and_not_zero():
    stage = Stage()
    async with stage.verifier():
        await stage.put(a_group(a_task(row=1)))
        verified = await stage.out()
        assert [v.reward for v in verified.verdicts] == [None, None]
        assert {v.unscorable for v in verified.verdicts} == {Unscorable.NO_ANSWER}
        event = await stage.event("group_verified")
        assert (event.fields["reward_mean"], event.fields["unscorable"]) == (None, 2)


async def test_the_event_tells_reward_means_and_no_answer():
    stage = Stage()
    async with stage.verifier():
        await stage.put(wrong_and_right())
        event = await stage.event("group_verified")
        assert event.fields["reward_mean"] == 1.0
        assert event.fields["rewards/exact"] == 0.5
        assert event.fields["accepted"] == 2
        assert "45" not in event.model_dump_json(include={"fields": {"group", "sampler"}})


# --- what leaves the ring -----------------------------------------------------------------------


def a_broken_task() -> RolloutGroup:
    return a_group().model_copy(update={"task": np.zeros(9, np.uint8)})


@pytest.mark.parametrize(
    ("group", "reason", "detail"),
    [
        (a_group(rollouts=(a_rollout(),)), DeadReason.BAD_STRUCTURE, "sampler-1: group_too_small"),
        (a_group(a_task(row=9)), DeadReason.BAD_STRUCTURE, "task_unknown"),
        (a_group(a_task(split="held_out")), DeadReason.BAD_STRUCTURE, "held_out row in queue rollout"),
        (a_broken_task(), DeadReason.UNDECODABLE, "the task inside"),
    ],
)
async def test_an_unsound_group_is_buried_with_its_reason(
    group: RolloutGroup, reason: DeadReason, detail: str
):
    stage = Stage()
    async with stage.verifier() as verifier:
        await stage.put(group)
        letter = await stage.letter()
        assert (letter.reason, letter.group_id, letter.queue) == (reason, group.group_id, "rollout")
        assert detail in letter.detail
    assert (await stage.hand.depth(Queue.ROLLOUT)).total == 0
    assert (verifier.rejected, verifier.verified) == (1, 0)


async def dead_letter(stage: Stage) -> DeadLetter:
    """Wait for a dead letter that no event tells of: the ring's own."""
    while not (frames := await stage.hand.dead_letters()):
        await stage.hand.depth(Queue.ROLLOUT)
    return decode(frames[0]).expect(DeadLetter)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"no frame at all", DeadReason.UNDECODABLE),
        (encode(a_verified_group(), an_identity()), DeadReason.UNDECODABLE),
        (encode(a_group(a_task(run="other")), an_identity()), DeadReason.WRONG_RUN),
    ],
)
async def test_a_message_that_is_none_of_ours_is_buried(frame: bytes, reason: DeadReason):
    stage = Stage()
    async with stage.verifier():
        await stage.hand.publish(Queue.ROLLOUT, frame, "1")
        assert (await dead_letter(stage)).reason is reason


async def test_a_message_delivered_too_often_is_buried():
    stage = Stage()
    await stage.hand.create_run(stage.spec)
    await stage.put(a_group())
    consumer = await stage.hand.consume(Queue.ROLLOUT, 1)
    for _ in range(stage.spec.sampling.deliveries_max):
        await (await consumer.next()).release()
    await consumer.close()
    async with stage.verifier():
        letter = await dead_letter(stage)
        assert (letter.reason, letter.group_id) == (DeadReason.TOO_MANY_DELIVERIES, "learner-1.0")


async def test_a_group_signed_by_somebody_else_is_buried():
    stage = Stage()
    known = {"sampler-1": an_identity("sampler-2").public_key}
    async with stage.verifier(trust=known.get):
        await stage.put(a_group())
        assert "sampler_mismatch" in (await stage.letter()).detail


async def test_what_an_auditor_finds_is_buried_unscored():
    class Suspicious:
        def refusal(self, public_key: str) -> str | None:
            return None

        async def audit(
            self, group: RolloutGroup, task: Task, signed: Signed
        ) -> tuple[DeadReason, str] | None:
            return DeadReason.AUDIT_FAILED, f"{group.sampler} lies about row {task.row}"

    stage = Stage()
    async with stage.verifier(HeldScorer(), auditor=Suspicious()):
        await stage.put(a_group())
        assert (await stage.letter()).detail == "sampler-1: sampler-1 lies about row 0"
