"""The auditor in the ring: liars are quarantined, the broken are told and recover, the honest go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from node.audits import lift, standing_lines, standing_of
from node.virtual_time import in_virtual_time
from protocol.codec import decode_as, encode
from protocol.errors import OperatorError
from protocol.messages import RolloutGroup
from protocol.ports import Write
from protocol.reasons import DeadReason, Judgement
from protocol.subjects import Bucket, Queue, standing_key
from roles.sampler.fake_engine import FakeEngine
from roles.standings import Standings
from tests.build import a_group, a_task, an_identity
from tests.roles.verifier.courtroom import Courtroom, Forger, Stuck, thrown_out


@asynccontextmanager
async def a_court(
    directory: Path, engine: type[FakeEngine] = FakeEngine, **audit: Any
) -> AsyncIterator[Courtroom]:
    """``verifier-1`` and ``sampler-1``; everybody leaves at the end."""
    court = await Courtroom.at(directory, **audit)
    court.verifier("verifier-1")
    court.sampler("sampler-1", engine)
    yield court
    await court.end()


@in_virtual_time
async def test_an_honest_sampler_notices_nothing_and_one_group_in_ten_is_audited(tmp_path: Path):
    async with a_court(tmp_path) as court:
        auditor = court.auditors["verifier-1"]
        await court.groups(104)
        assert len(court.went_on("sampler-1")) == 104
        assert auditor.audited == 14, "the first four, and one in each block of ten"
        assert court.standing("sampler-1") is None


@in_virtual_time
async def test_a_forger_is_quarantined_with_its_evidence_and_gets_no_more_tasks(tmp_path: Path):
    async with a_court(tmp_path, Forger) as court:
        await court.groups(50)
        standing = court.judged("sampler-1")
        assert (standing.judgement, standing.judge) == (Judgement.QUARANTINED, "verifier-1")
        finding = standing.findings[-1]
        group = decode_as(finding.group.tobytes(), RolloutGroup)
        assert (group.group_id, group.sampler, finding.clock) == (finding.group_id, "sampler-1", group.clock)
        assert finding.numbers["surprise"] > 1
        assert max(v for k, v in finding.numbers.items() if k.startswith("evidence/")) >= 9
        thief = court.work["sampler-1"]
        assert thief.done()
        with pytest.raises(BaseExceptionGroup) as ended:
            thief.result()
        assert thrown_out(ended.value)
        assert (await court.ground.bus().depth(Queue.TASK)).pending > 20, "nobody takes them"


@in_virtual_time
async def test_a_forger_that_sends_many_groups_at_once_gets_no_more_of_them_through(tmp_path: Path):
    court = await Courtroom.at(tmp_path)
    court.verifier("verifier-1", audit_s=0.5)
    court.sampler("sampler-1", Forger)
    await court.groups(60, every_s=0.0)
    await court.ground.clock.sleep(60.0)
    assert court.judged("sampler-1").judgement is Judgement.QUARANTINED
    assert len(court.went_on("sampler-1")) <= 2, "most were audited and refused"
    assert court.buried(DeadReason.AUDIT_FAILED) >= 3
    assert court.buried(DeadReason.QUARANTINED) > 0, "they were in hand when it was judged"
    await court.end()


@in_virtual_time
async def test_no_group_goes_on_before_its_verifier_can_audit(tmp_path: Path):
    """A verifier that starts anew has groups waiting for it."""
    court = await Courtroom.at(tmp_path)
    court.sampler("sampler-1", Forger)
    await court.groups(20, every_s=0.0)
    await court.ground.clock.sleep(10.0)
    court.verifier("verifier-1", audit_s=0.5)
    await court.ground.clock.sleep(30.0)
    assert len(court.went_on("sampler-1")) <= 2
    assert court.buried(DeadReason.AUDIT_FAILED) >= 3
    await court.end()


@in_virtual_time
async def test_honest_samplers_beside_a_liar_do_its_work(tmp_path: Path):
    court = await Courtroom.at(tmp_path)
    court.verifier("verifier-1")
    court.sampler("liar", Forger)
    court.sampler("sampler-1")
    await court.groups(80)
    assert court.standing("sampler-1") is None
    lied = court.went_on("liar")
    assert len(court.went_on("sampler-1")) + len(lied) + len(court.ground.dead) == 80
    assert len(lied) <= 2, "most were audited and refused"
    await court.end()


@in_virtual_time
async def test_whoever_ignores_its_quarantine_is_refused_by_every_verifier(tmp_path: Path):
    async with a_court(tmp_path, Forger) as court:
        await court.groups(40)
        assert court.judged("sampler-1").judgement is Judgement.QUARANTINED
        court.verifier("verifier-2")
        await court.ground.clock.sleep(4.0)
        before = court.buried(DeadReason.QUARANTINED)
        for number in range(6):
            group = a_group(a_task(group_id=f"learner-1.{900 + number}", group_size=2))
            frame = encode(group, an_identity("sampler-1"))
            await court.ground.bus("sampler-1").publish(Queue.ROLLOUT, frame, f"again:{number}")
        await court.ground.clock.sleep(2.0)
        assert court.buried(DeadReason.QUARANTINED) == before + 6
        refused_by = {one.node for one in court.ground.dead if one.reason is DeadReason.QUARANTINED}
        assert refused_by == {"verifier-1", "verifier-2"}


@in_virtual_time
async def test_a_sampler_with_an_old_adapter_is_told_so_reloads_and_works_on(tmp_path: Path):
    async with a_court(tmp_path, Stuck) as court:
        await court.ground.clock.sleep(1.0)
        for count in (1, 2):
            await court.ground.commit_update(court.genesis, count)
        await court.ground.clock.sleep(1.0)
        await court.groups(30)
        standing = court.judged("sampler-1")
        assert standing.judgement is Judgement.WARNED
        assert "those of the base model without an adapter: it must load the newest policy" in standing.reason
        assert court.ground.told("policy_reloaded") == [{"reason": standing.reason}]
        before = len(court.went_on("sampler-1"))
        await court.groups(60)
        assert len(court.went_on("sampler-1")) == before + 60
        standing = court.judged("sampler-1")
        assert standing.judgement is Judgement.WARNED, "nothing was held against it since"


class Incurable(Stuck):
    """Reloading does not help."""

    async def unload_policy(self, name: str) -> None:
        await FakeEngine.unload_policy(self, name)


@in_virtual_time
async def test_a_sampler_that_was_told_and_goes_on_is_quarantined(tmp_path: Path):
    async with a_court(tmp_path, Incurable) as court:
        await court.ground.clock.sleep(1.0)
        await court.ground.commit_update(court.genesis, 1)
        await court.ground.clock.sleep(1.0)
        await court.groups(80)
        standing = court.judged("sampler-1")
        assert standing.judgement is Judgement.QUARANTINED
        assert court.ground.told("sampler_warned")


@in_virtual_time
async def test_an_engine_without_a_tolerance_is_refused_and_told_why(tmp_path: Path):
    async with a_court(tmp_path, tolerances={"transformers-*": {"median": 0.1}}) as court:
        await court.groups(5)
        assert court.went_on("sampler-1") == []
        standing = court.judged("sampler-1")
        assert standing.judgement is Judgement.WARNED
        assert "engine fake is none that this run audits (transformers-*)" in standing.reason
        assert len(court.ground.told("sampler_warned")) == 1


@in_virtual_time
async def test_a_person_sees_the_evidence_and_lifts_the_quarantine(tmp_path: Path):
    async with a_court(tmp_path, Forger) as court:
        await court.groups(40)
        standings = await standings_of(court)
        lines = "\n".join(standing_lines(standing_of(standings, "sampler-1")))
        assert "sampler-1 is quarantined by verifier-1" in lines
        assert "evidence in nats: logprobs" in lines
        assert "4 rollouts of train row 0, signed by U" in lines
        await lift(standings, "sampler-1", "operator")
        with pytest.raises(OperatorError, match="operator has lifted that"):
            await lift(standings, "sampler-1", "operator")
        await court.ground.clock.sleep(4.0)
        court.sampler("sampler-1")
        before = len(court.went_on("sampler-1"))
        await court.groups(20)
        assert len(court.went_on("sampler-1")) - before >= 20
        standing = court.judged("sampler-1")
        assert (standing.judgement, len(standing.findings) > 0) == (Judgement.LIFTED, True)
        with pytest.raises(OperatorError, match="no verifier judged nobody; judged: sampler-1"):
            standing_of(standings, "nobody")


@in_virtual_time
async def test_a_broker_that_lost_its_disk_is_told_again_who_is_quarantined(tmp_path: Path):
    async with a_court(tmp_path, Forger) as court:
        court.verifier("verifier-2")
        await court.groups(40)
        key = standing_key(an_identity("sampler-1").public_key)
        held = court.ground.run.buckets[Bucket.RUN].get(key)
        assert held is not None
        await court.ground.clock.sleep(4.0)
        court.ground.broker.lose_disk()
        await court.ground.clock.sleep(4.0)  # nothing is said to a broker that does not know the run
        court.ground.broker.create(court.ground.spec, 1000)
        await court.ground.claim_genesis()
        await court.ground.clock.sleep(4.0)
        again = court.ground.run.buckets[Bucket.RUN].get(key)
        assert again is not None
        assert again.value == held.value, "as its judge signed it"
        court.sampler("sampler-1", Forger)
        await court.ground.clock.sleep(4.0)
        assert court.work["sampler-1"].done(), "thrown out before its first group"
        await lift(await standings_of(court), "sampler-1", "operator")
        await court.ground.clock.sleep(10.0)
        standing = court.judged("sampler-1")
        assert standing.judgement is Judgement.LIFTED, "what stands is not written over"


async def standings_of(court: Courtroom) -> Standings:
    standings = Standings(court.ground.ring("operator"))
    await standings.read()
    return standings


@in_virtual_time
async def test_a_standing_that_its_own_key_signed_is_ignored(tmp_path: Path):
    async with a_court(tmp_path, Forger) as court:
        await court.groups(40)
        standing = court.judged("sampler-1")
        forged = standing.model_copy(update={"judgement": Judgement.LIFTED})
        own = an_identity("sampler-1")
        key = standing_key(own.public_key)
        await court.ground.bus("sampler-1").commit(Bucket.RUN, [Write(key, encode(forged, own))])
        await court.ground.clock.sleep(4.0)
        assert court.auditors["verifier-1"].refusal(own.public_key)


@in_virtual_time
async def test_a_redelivered_group_is_audited_once(tmp_path: Path):
    async with a_court(tmp_path, rate=1.0) as court:
        auditor = court.auditors["verifier-1"]
        await court.groups(3)
        (first, *_) = [one.group.tobytes() for one in court.verified]
        for number in range(5):
            await court.ground.bus("thief").publish(Queue.ROLLOUT, first, f"copy:{number}")
        await court.ground.clock.sleep(2.0)
        assert auditor.audited == 3
        assert court.standing("sampler-1") is None
        assert all(one.verdicts for one in court.verified)
