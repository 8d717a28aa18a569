"""Sequential evidence: honest streams stay below the bound however often one looks, others do not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protocol.audit_spec import AuditSpec
from roles.verifier.audit_process import FLAG_RATES, Ranks, SequentialTest, flag_ratios, log_mean
from roles.verifier.audit_stream import Chosen


def test_a_test_begins_without_evidence():
    assert SequentialTest(3).log_evidence == pytest.approx(0.0)


def test_ratios_of_one_leave_the_evidence_where_it_is():
    test = SequentialTest(2)
    for _ in range(50):
        test.add(np.zeros(2))
        assert test.log_evidence == pytest.approx(0.0, abs=1e-12)


def test_the_mean_of_the_evidence_over_honest_streams_is_one():
    """A fair coin against a coin that falls heads three times in four, over every stream of ten throws."""
    total = 0.0
    for stream in range(1 << 10):
        test = SequentialTest(1)
        for throw in range(10):
            test.add(np.log([(0.75 if stream >> throw & 1 else 0.25) / 0.5]))
        total += math.exp(test.log_evidence) / (1 << 10)
    assert total == pytest.approx(1.0)


def test_honest_flags_reach_the_bound_no_more_often_than_it_says():
    rng, bound, crossed = np.random.default_rng(0), 0.05, 0
    for _ in range(400):
        test = SequentialTest(len(FLAG_RATES))
        for flag in rng.random(200) < 0.02:
            test.add(flag_ratios(0.02, flagged=bool(flag)))
            if test.log_evidence >= math.log(1 / bound):
                crossed += 1
                break
    assert crossed / 400 <= bound


def test_a_late_liar_is_found_in_spite_of_a_long_honest_past():
    test = SequentialTest(len(FLAG_RATES))
    for _ in range(5000):
        test.add(flag_ratios(0.02, flagged=False))
    needed = 0
    while test.log_evidence < math.log(1e4):
        test.add(flag_ratios(0.02, flagged=True))
        needed += 1
    assert needed <= 9


def test_a_late_liar_raises_the_alarm_as_soon_as_an_early_one():
    for honest in (0, 5000):
        test = SequentialTest(len(FLAG_RATES))
        for _ in range(honest):
            test.add(flag_ratios(0.02, flagged=False))
        alarms = []
        for _ in range(4):
            test.add(flag_ratios(0.02, flagged=True))
            alarms.append(test.alarmed(100.0))
        assert alarms == [False, True, False, True], "and begins anew"


def test_honest_flags_raise_an_alarm_no_more_often_than_the_level_says():
    rng, alarms, groups = np.random.default_rng(3), 0, 20_000
    test = SequentialTest(len(FLAG_RATES))
    for flag in rng.random(groups) < 0.02:
        test.add(flag_ratios(0.02, flagged=bool(flag)))
        alarms += test.alarmed(50.0)
    assert 0 < alarms <= groups / 50


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3])
def test_flags_are_fair_bets_at_their_rate(rate: float):
    mean = rate * np.exp(flag_ratios(rate, flagged=True)) + (1 - rate) * np.exp(
        flag_ratios(rate, flagged=False)
    )
    assert mean == pytest.approx(1.0)


def test_uniform_ranks_are_no_evidence_and_others_are():
    rng = np.random.default_rng(1)
    honest, high = Ranks(), Ranks()
    fair = sum(honest.log_ratio(rng.random(200)) for _ in range(20))
    lying = sum(high.log_ratio(rng.random(200) ** 1.5) for _ in range(20))
    assert fair < 5
    assert lying > 100


def test_the_evidence_of_one_group_is_the_mean_over_alternatives():
    assert log_mean(np.log([1.0, 3.0])) == pytest.approx(math.log(2.0))


def test_one_group_in_each_block_is_audited_at_a_place_of_its_own():
    chosen = Chosen(b"secret", AuditSpec(rate=0.1, first=4))
    wanted = [number for number in range(404) if chosen.wants("key", number)]
    assert wanted[:4] == [0, 1, 2, 3]
    assert [(number - 4) // 10 for number in wanted[4:]] == list(range(40))
    places = {(number - 4) % 10 for number in wanted[4:]}
    assert len(places) > 5
    other = Chosen(b"another", AuditSpec(rate=0.1, first=4))
    assert wanted != [number for number in range(404) if other.wants("key", number)]
    assert wanted != [number for number in range(404) if chosen.wants("another key", number)]
