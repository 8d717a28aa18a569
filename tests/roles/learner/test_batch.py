"""From groups to samples: advantages belong to the group, and the numbers say what happened."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models

from protocol.clock import GENESIS, VectorClock
from protocol.codec import decode_as, encode
from protocol.messages import FinishReason, RolloutGroup, SamplingParams, VerifiedGroup
from protocol.runspec import LossSpec
from roles.learner.batch import Batch, make_batch
from roles.learner.buffer import Candidate
from roles.learner.lease import Lease
from tests.build import a_clock, a_group, a_rollout, a_task, a_verified_group, an_identity
from tests.ground import Handed, a_candidate

STD = LossSpec(advantage_scale="std")


def a_batch(*candidates: Candidate, loss: LossSpec | None = None, version: float = 0.0) -> Batch:
    return make_batch(candidates, loss or LossSpec(), VectorClock.of({"learner-1": int(version)}), version)


def test_advantages_are_computed_within_each_group_however_rewards_arrived():
    batch = a_batch(
        a_candidate("learner-1.1", rewards=(1, 0, 1, 0)),
        a_candidate("learner-1.2", rewards=(0, 0, 1, 0)),
        loss=STD,
    )
    first, second = ([s.advantage for s in batch.samples[i : i + 4]] for i in (0, 4))
    assert first == pytest.approx([0.8658754, -0.8658754, 0.8658754, -0.8658754], abs=1e-6)
    assert second == pytest.approx([-0.4999, -0.4999, 1.4997, -0.4999], abs=1e-4)


def test_an_unscorable_rollout_has_no_advantage_and_leaves_the_baseline():
    batch = a_batch(a_candidate(rewards=(1.0, None, 0.0, 0.0)))
    assert [s.advantage for s in batch.samples] == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])


def test_a_group_in_which_all_are_alike_is_counted_and_teaches_nothing():
    batch = a_batch(a_candidate(rewards=(1.0, 1.0)), a_candidate("learner-1.1", rewards=(1.0, 0.0)))
    assert [s.advantage for s in batch.samples] == [0.0, 0.0, 0.5, -0.5]
    assert batch.metrics["frac_reward_zero_std"] == 0.5


def test_staleness_is_the_learners_version_minus_the_groups():
    clocks = [a_clock(**{"learner-1": version}) for version in (5, 3, 4)]
    batch = a_batch(*(a_candidate(f"learner-1.{i}", clock=c) for i, c in enumerate(clocks)), version=5.0)
    assert (batch.metrics["sample/staleness_mean"], batch.metrics["sample/staleness_max"]) == (1.0, 2.0)
    assert batch.staleness_max == 2.0


def test_a_rollout_is_on_policy_only_under_exactly_the_learners_clock():
    mine, older = a_candidate(clock=a_clock(**{"learner-1": 5})), a_candidate("learner-1.1", clock=GENESIS)
    assert [s.on_policy for s in a_batch(mine, older, version=5.0).samples] == [True, True, False, False]


def test_samples_carry_prompt_temperature_and_truncation():
    task = a_task(params=SamplingParams(max_new_tokens=5, temperature=0.7))
    cut = a_rollout(index=1, token_ids=[4] * 5, sampler_logprobs=[-1.0] * 5, finish=FinishReason.LENGTH)
    group = a_group(task, rollouts=(a_rollout(), cut))
    batch = a_batch(Candidate(task, group, a_verified_group(group), Lease(Handed()), 0.0))
    assert [sample.truncated for sample in batch.samples] == [False, True]
    assert {sample.temperature for sample in batch.samples} == {0.7}
    assert batch.samples[0].prompt_token_ids.tolist() == [1, 5, 6, 7]
    assert batch.metrics["completions/clipped_ratio"] == 0.5
    assert batch.metrics["completions/max_length"] == 5.0
    assert batch.metrics["completions/mean_terminated_length"] == 3.0
    assert (batch.metrics["sample/tokens_mean"], batch.metrics["sample/tokens_max"]) == (8.0, 9.0)


def test_the_mean_reward_is_over_all_scored_rollouts():
    batch = a_batch(
        a_candidate(rewards=(1.0, 0.0, None)), a_candidate("learner-1.1", rewards=(1.0, 1.0, 1.0))
    )
    assert batch.metrics["reward"] == pytest.approx(4 / 5)
    assert batch.metrics["sample/unscorable_frac"] == pytest.approx(1 / 6)


def a_merging_tokenizer() -> Tokenizer:
    """A BPE tokenizer under which decoding and encoding again is not the identity."""
    vocabulary = {"h": 0, "e": 1, "l": 2, "o": 3, "he": 4, "ll": 5, "llo": 6, "hello": 7}
    return Tokenizer(models.BPE(vocabulary, [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]))


def test_the_learner_trains_on_the_ids_that_were_sampled_not_on_their_text():
    sampled, logprobs = [4, 6], [-0.2, -0.7]
    tokenizer = a_merging_tokenizer()
    assert tokenizer.encode(tokenizer.decode(sampled).replace(" ", "")).ids == [7]

    task = a_task(group_size=2)
    rollouts = tuple(a_rollout(index=i, token_ids=sampled, sampler_logprobs=logprobs) for i in range(2))
    group = a_group(task, rollouts=rollouts)
    verified = decode_as(encode(a_verified_group(group), an_identity("verifier-1")), VerifiedGroup)
    arrived = decode_as(verified.group.tobytes(), RolloutGroup)

    batch = a_batch(Candidate(task, arrived, verified, Lease(Handed()), 0.0))
    assert [s.token_ids.tolist() for s in batch.samples] == [sampled, sampled]
    assert [s.sampler_logprobs.tolist() for s in batch.samples] == [pytest.approx(logprobs)] * 2
