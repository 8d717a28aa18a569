"""The learning rate of each update."""

from __future__ import annotations

import pytest

from protocol.learner_spec import LearnerSpec
from roles.learner.schedule import learning_rate


@pytest.mark.parametrize(
    ("update", "expected"), [(0, 1e-5), (9, 1e-4), (10, 1e-4), (40, 7.5e-5), (55, 5e-5), (100, 0)]
)
def test_warm_up_then_half_a_cosine(update, expected):
    spec = LearnerSpec(learning_rate=1e-4, schedule="cosine", warmup_updates=10, updates=100)
    assert learning_rate(spec, update) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("update", "expected"), [(0, 1e-4), (50, 5e-5), (99, 1e-6), (100, 0), (150, 0)])
def test_a_line_falls_to_zero_at_the_last_update_and_stays_there(update, expected):
    spec = LearnerSpec(learning_rate=1e-4, schedule="linear", updates=100)
    assert learning_rate(spec, update) == pytest.approx(expected, abs=1e-12)


def test_constant_is_the_default():
    assert learning_rate(LearnerSpec(learning_rate=3e-3), 10_000) == 3e-3
