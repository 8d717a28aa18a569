"""The tiny model: same bytes for a seed, a folder that transformers reads, right one time in four."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from node import tiny_model as tiny
from node.tiny_model import answer_logits, demonstrations, initial_weights, tiny_model, train

STEPS = 2


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    first, second = (tiny_model(tmp_path / name, 0, STEPS) for name in "ab")
    assert bytes_of(first) == bytes_of(second)
    other = tiny_model(tmp_path / "a", 1, STEPS)
    assert bytes_of(other)["model.safetensors"] != bytes_of(first)["model.safetensors"]


def test_training_leaves_no_trace_in_torch():
    torch.manual_seed(0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():
        train(0, STEPS)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_model_that_is_there_is_not_made_again(tmp_path):
    directory = tiny_model(tmp_path, 0, STEPS)
    (directory / "model.safetensors").write_bytes(b"as it was")
    assert tiny_model(tmp_path, 0, STEPS) == directory
    assert (directory / "model.safetensors").read_bytes() == b"as it was"


def test_two_that_make_it_at_once_both_get_it_whole(tmp_path):
    barrier = threading.Barrier(2)
    made: list[Path] = []

    def make() -> None:
        barrier.wait()
        made.append(tiny_model(tmp_path, 0, STEPS))

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] == made[1]
    assert list(tmp_path.iterdir()) == [made[0]]
    assert bytes_of(made[0]) == bytes_of(tiny_model(tmp_path / "alone", 0, STEPS))


def test_a_making_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def no_space(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny, "_write_json", no_space)
    with pytest.raises(OSError, match="No space left"):
        tiny_model(tmp_path, 0, STEPS)
    assert list(tmp_path.iterdir()) == []


def test_another_recipe_is_another_folder(tmp_path, monkeypatch):
    before = tiny_model(tmp_path, 0, STEPS)
    monkeypatch.setattr(tiny, "RECIPE", tiny.RECIPE + 1)
    assert tiny_model(tmp_path, 0, STEPS) != before


def test_transformers_computes_what_was_trained(tmp_path):
    directory = tiny_model(tmp_path, 0, STEPS)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert set(model.state_dict()) == set(initial_weights(0))
    token_ids = torch.from_numpy(demonstrations(5, 1))
    with torch.no_grad():
        logits = model(input_ids=token_ids).logits[:, tiny.PROMPT_TOKENS - 1 :]
        torch.testing.assert_close(answer_logits(model.state_dict(), token_ids), logits, atol=1e-6, rtol=0)
    assert model.generation_config.eos_token_id == tiny.EOS


def test_its_tokenizer_has_one_token_a_character(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(tmp_path, 0, STEPS))
    assert tokenizer.encode("42>") == [1, 7, 5, 41]
    assert tokenizer.encode("<bos>42>", add_special_tokens=False) == [1, 7, 5, 41]
    assert tokenizer.decode([4, 5, 2], skip_special_tokens=True) == "12"
    chat = [{"role": "user", "content": "42>"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "<bos>42>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 0, len(tiny.CHARACTERS))


def test_three_demonstrations_in_ten_are_right_and_the_others_wrong_in_one_of_three_ways():
    rows = demonstrations(20_000, 0)
    digits, answers = rows[:, 1:5], rows[:, 6:10]
    right = np.sort(digits, axis=1)
    share = (answers == right).all(axis=1).mean()
    assert 0.29 < share < 0.31
    ways = np.stack([right, right[:, ::-1], digits, digits[:, ::-1]], axis=1)
    assert (ways == answers[:, None]).all(axis=2).any(axis=1).all()


@pytest.mark.e2e
@pytest.mark.parametrize("seed", range(3))
def test_it_sorts_right_about_one_time_in_four(seed):
    """The exact probability of the right answer at temperature 1, over all inputs."""
    digits = np.array(list(itertools.product(range(10), repeat=4)))
    one = np.ones((len(digits), 1), np.int64)
    rows = np.hstack([one, digits + tiny.ZERO, one * tiny.ARROW, np.sort(digits) + tiny.ZERO, one * tiny.EOS])
    token_ids = torch.from_numpy(rows)
    logprobs = answer_logits(train(seed), token_ids[:, :-1]).log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[:, tiny.PROMPT_TOKENS :, None]).sum((1, 2))
    assert 0.15 < chosen.exp().mean().item() < 0.40
