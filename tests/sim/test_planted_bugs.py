"""The simulation finds bugs: each planted one within two hundred seeds, and none where there is none."""

from __future__ import annotations

import pytest

from tests.sim.plants import PLANTS
from tests.sim.play import play

SEEDS = range(200)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    PLANTS[name](monkeypatch.setattr)
    assert any(not play(seed).passed for seed in SEEDS), "two hundred seeds did not notice it"


def test_a_seed_is_played_the_same_way_again():
    first, again, other = (play(seed, keep_trace=True) for seed in (7, 7, 8))
    assert len(first.lines) > 100
    assert first.lines == again.lines
    assert first.lines != other.lines
