"""``grpo-node presets`` shows what a run file's preset amounts to."""

from __future__ import annotations

import json

import pytest

from protocol.presets import PRESETS
from protocol.runspec import LossSpec
from tests.command import command


def shown(capfd: pytest.CaptureFixture[str], *options: str) -> str:
    said = command(capfd)("presets", *options)
    assert said.code == 0
    return said.out


def test_every_preset_is_listed_with_its_paper_and_what_it_sets(capfd):
    text = shown(capfd)
    for name, preset in PRESETS.items():
        assert f"{name}  ({preset.paper})" in text
    assert "    clip_low = 0.0003\n" in text


def test_the_numbers_are_the_whole_loss_as_json(capfd):
    numbers = json.loads(shown(capfd, "--json"))
    assert numbers.keys() == PRESETS.keys()
    assert LossSpec(**numbers["gspo"]).ratio_level == "sequence"
    assert numbers["dr_grpo"]["aggregation_tokens"] == 512
