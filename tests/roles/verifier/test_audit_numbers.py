"""Agreement of log-probabilities, distance from the seed, and copies, on made-up facts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protocol.audit_spec import ToleranceSpec
from roles.streams import rollout_stream
from roles.verifier.audit_agreement import differences, exceeded, seed_distance, tolerance_of
from roles.verifier.audit_copies import Copies
from roles.verifier.audit_evidence import chosen_rollouts
from roles.verifier.audit_facts import TokenFacts, standardized_surprise
from tests.build import a_group, a_rollout, a_task


def some_facts(logprobs: list[float], below: list[float] | None = None, **changes: float) -> TokenFacts:
    own = np.array(logprobs, np.float64)
    column = np.zeros(len(own))
    entropy, varentropy = changes.get("entropy", 0.0), changes.get("varentropy", 0.0)
    return TokenFacts(
        logprobs=own,
        entropy=column + entropy,
        varentropy=column + varentropy,
        above=column,
        level=np.exp(own),
        below=column if below is None else np.array(below),
        sampling=np.zeros((1, len(own))),
        endings=np.zeros((1, len(own))),
    )


def test_statistics_of_differences():
    facts = [some_facts([-1.0, -2.0]), some_facts([-3.0])]
    claimed = [np.array([-1.1, -1.9], np.float32), np.array([-2.0], np.float32)]
    found = differences(claimed, facts)
    assert found == pytest.approx({"median": 0.1, "p90": 0.82, "largest": 1.0, "bias": 1 / 3}, abs=1e-6)


def test_only_what_is_beyond_its_tolerance_is_flagged():
    tolerance = ToleranceSpec(median=0.1, p90=0.2, largest=1.0, bias=0.1)
    assert exceeded({"median": 0.1, "p90": 0.3, "largest": math.nan, "bias": 0.0}, tolerance) == (
        "p90",
        "largest",
    )
    assert exceeded({"median": 0.0, "p90": 0.0, "largest": 0.0, "bias": 0.0, "seed": 0.5}, tolerance) == ()


def test_the_longest_pattern_counts():
    table = {"*": ToleranceSpec(median=1.0), "transformers-*-cpu-*": ToleranceSpec(median=0.1)}
    found = tolerance_of("transformers-5.24.0-cpu-float32", table)
    assert found is not None
    assert found.median == 0.1
    assert tolerance_of("vllm-0.32", {"transformers-*": ToleranceSpec()}) is None


def test_a_token_that_the_seed_gives_is_at_no_distance_and_another_is():
    uniforms = rollout_stream(7, 0).random(8)
    u = float(uniforms[0])
    holds = some_facts([math.log(0.2)], below=[u - 0.1])
    misses = some_facts([math.log(0.2)], below=[u - 0.5])
    assert seed_distance([uniforms], [holds]) == 0.0
    assert seed_distance([uniforms], [misses]) == pytest.approx(0.3)
    assert seed_distance([uniforms], [some_facts([math.log(0.2)], below=[u + 0.05])]) == pytest.approx(0.05)


def test_the_surprise_is_in_standard_errors():
    facts = [some_facts([-2.0] * 100, entropy=1.5, varentropy=4.0)]
    assert standardized_surprise(facts) == pytest.approx(100 * 0.5 / math.sqrt(400))
    assert standardized_surprise([some_facts([-0.0])]) == 0.0


def test_a_copy_of_something_improbable_is_evidence_and_of_something_sure_is_not():
    for logprob, at_least, at_most in ((-8.0, 20.0, 50.0), (-0.01, -0.1, 0.1)):
        rollouts = [a_rollout(index=i) for i in range(4)]
        ratios = Copies().log_ratios(a_task(group_size=4), rollouts, [some_facts([logprob] * 3)] * 4)
        assert at_least / 2 <= ratios[1] <= 3 * at_most


def test_the_same_draw_of_the_same_task_is_no_copy():
    copies, facts = Copies(), [some_facts([-9.0] * 3)]
    first = copies.log_ratios(a_task(), [a_rollout()], facts)
    again = copies.log_ratios(a_task(), [a_rollout()], facts)
    other = copies.log_ratios(a_task(seed=8), [a_rollout()], facts)
    assert (list(first), list(again)) == ([0, 0], [0, 0])
    assert other.min() > 10


def test_an_audit_is_bounded_in_tokens_and_takes_at_least_one_rollout():
    group = a_group(a_task(group_size=6))
    rng = np.random.default_rng(0)
    assert len(chosen_rollouts(group, 4, 21, rng)) == 3
    assert len(chosen_rollouts(group, 4, 1, rng)) == 1
    assert [r.index for r in chosen_rollouts(group, 4, 1000, rng)] == [0, 1, 2, 3, 4, 5]
    first = {chosen_rollouts(group, 4, 1, rng)[0].index for _ in range(60)}
    assert len(first) == 6
