"""``bench.audit`` draws streams of groups, runs the verifier's tests on them, and says how sure it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.audit import told_of
from bench.lies.trials import NEVER, Found, Pool, found_after, possible, wilson
from protocol.audit_spec import AuditSpec
from roles.verifier.audit_copies import COPIED
from roles.verifier.audit_facts import ENDINGS, SAMPLING
from roles.verifier.audit_stream import Evidence

SPEC = AuditSpec(rate=0.1)


def some_evidence(*flags: str) -> Evidence:
    """A group that speaks by its flags only."""
    return Evidence(
        flags=flags,
        flag_rate=0.02,
        sampling=np.zeros(len(SAMPLING)),
        endings=np.zeros(len(ENDINGS)),
        copies=np.zeros(len(COPIED)),
        ranks=np.zeros(0),
        numbers=dict.fromkeys(flags, 1.0),
    )


HONEST, LIAR = Pool([some_evidence()] * 5), Pool([some_evidence("seed")] * 5)


def test_a_pool_repeats_a_group_only_after_all_others():
    pool = Pool([some_evidence(name) for name in "abc"])
    drawn = [one.flags for one in itertools.islice(pool.drawn(np.random.default_rng(0)), 6)]
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == [("a",), ("b",), ("c",)]


def test_a_liar_is_found_and_its_past_is_not_counted():
    rng = np.random.default_rng(0)
    newcomer = found_after(LIAR, HONEST, SPEC, rng, before=0, most=100)
    established = found_after(LIAR, HONEST, SPEC, rng, before=200, most=100)
    assert newcomer.groups == newcomer.audited <= 6, "all of its first groups are audited, and fail"
    assert newcomer.audited <= established.audited <= established.groups <= 30


def test_an_honest_sampler_is_never_found_and_one_group_in_ten_is_audited():
    found = found_after(HONEST, HONEST, SPEC, np.random.default_rng(0), before=0, most=1004)
    closer_look = 9  # nothing speaks for or against it, so that once in a hundred audits there is an alarm
    assert found == Found(NEVER, 104 + closer_look)


def test_what_is_told_of_trials():
    found = [Found(10, 3), Found(20, 4), Found(60, 9), Found(NEVER, 12)]
    told = told_of(found, group_size=8)
    assert (told["within_50"], told["groups_p50"], told["groups_p99"]) == (0.5, 60.0, None)
    assert (told["by_rollouts_16"], told["by_rollouts_32"], told["by_rollouts_128"]) == (0.0, 0.5, 0.75)


def test_no_test_finds_more_than_the_audits_meet():
    assert possible(0.6, SPEC, 50) == pytest.approx(1 - 0.4**5)
    rng, half = np.random.default_rng(1), Pool([some_evidence("seed"), some_evidence()] * 100)
    found = [found_after(half, HONEST, SPEC, rng, before=200, most=50) for _ in range(300)]
    share = sum(one.groups <= 50 for one in found) / 300
    assert 0.85 < share <= possible(0.5, SPEC, 50) + 0.02


@pytest.mark.parametrize(
    ("hits", "trials", "interval"),
    [(0, 10, (0.0, 0.2775)), (81, 263, (0.2553, 0.3662)), (1000, 1000, (0.9962, 1.0))],
)
def test_the_interval_of_a_share_is_that_of_wilson(hits: int, trials: int, interval: tuple[float, float]):
    assert wilson(hits, trials) == pytest.approx(interval, abs=1e-4)
