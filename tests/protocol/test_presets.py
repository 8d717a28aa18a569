"""Presets: each is a point of LossSpec with its paper, and a run file's own numbers win."""

from __future__ import annotations

import pytest

from protocol.errors import OperatorError
from protocol.presets import PRESETS, loss_settings
from protocol.runspec import LossSpec, RunSpec
from tests.protocol.test_runspec import MINIMAL


def loss_of(text: str) -> LossSpec:
    return RunSpec.from_toml(MINIMAL + text, "run.toml").loss


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_loss_that_differs_from_the_default_and_has_a_paper(name):
    loss = loss_of(f'[loss]\npreset = "{name}"\n')
    for setting, value in PRESETS[name].settings.items():
        assert getattr(loss, setting) == value
    assert loss != LossSpec()
    assert PRESETS[name].paper.startswith("arXiv ")


def test_no_two_presets_are_the_same_loss():
    losses = [LossSpec(**loss_settings(name, {}, 8)) for name in PRESETS]
    assert len({loss.model_dump_json() for loss in losses}) == len(losses)


def test_gspo_is_what_its_paper_says():
    loss = loss_of('[loss]\npreset = "gspo"\n')
    assert (loss.ratio_level, loss.aggregation, loss.advantage_scale) == ("sequence", "sequence", "std")
    assert (loss.clip_low, loss.clip_high, loss.kl_beta) == (3e-4, 4e-4, 0.0)


def test_a_number_beside_the_preset_wins_whatever_the_order():
    first = loss_of('[loss]\npreset = "dapo"\nclip_high = 0.5\n')
    assert first == loss_of('[loss]\nclip_high = 0.5\npreset = "dapo"\n')
    assert (first.clip_high, first.mask_truncated) == (0.5, True)


def test_a_run_with_a_preset_is_the_run_with_its_numbers():
    """Peers see numbers only: the name is neither in the digest nor on the wire."""
    named = RunSpec.from_toml(MINIMAL + '[loss]\npreset = "two_sided_clip"\n', "a")
    text = '[loss]\nadvantage_scale = "std"\naggregation = "sequence"\ndual_clip = 4.0\n'
    assert named.digest == RunSpec.from_toml(MINIMAL + text, "b").digest
    assert "preset" not in named.model_dump_json()


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
def test_a_constant_divisor_is_the_longest_completion_unless_it_is_given(name):
    text = f'[loss]\npreset = "{name}"\n'
    assert loss_of(text).aggregation_tokens == 512
    assert loss_of(text + "[sampling]\nmax_new_tokens = 64\n").aggregation_tokens == 64
    assert loss_of(text + "aggregation_tokens = 9\n").aggregation_tokens == 9
    assert loss_of(text + 'aggregation = "token"\n').aggregation_tokens is None


@pytest.mark.parametrize("name", ["'grop'", "''", "7", "['grpo']"])
def test_an_unknown_preset_is_one_line_that_lists_the_names(name):
    with pytest.raises(OperatorError) as refused:
        loss_of(f"[loss]\npreset = {name}\n")
    line = str(refused.value)
    assert line.startswith("run.toml: loss.preset: no preset ")
    assert all(known in line for known in PRESETS)
    assert line.isprintable()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[loss]\npreset = 'grpo'\nclip_lo = 1.0\n", "loss.clip_lo: no such setting"),
        ("[sampling]\nmax_new_tokens = 'x'\n[loss]\npreset = 'dr_grpo'\n", "sampling.max_new_tokens"),
        ("[loss]\npreset = 'grpo'\naggregation_tokens = 8\n", "loss: aggregation_tokens belongs to"),
    ],
)
def test_what_is_wrong_beside_a_preset_is_named_as_ever(text, key):
    with pytest.raises(OperatorError, match=key):
        loss_of(text)
