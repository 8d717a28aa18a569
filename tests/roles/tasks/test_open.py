"""Opening a task set: the same rows everywhere, disjoint splits, and one clear line for each mistake."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.open import describe_skipped, open_tasks
from roles.tasks.taskset import Skipped, TaskSet

SORT = "builtin:sort-digits"

HELD_OUT = ["5755>", "2607>"]
TRAIN = ["6927>", "0402>", "6459>", "6719>"]
DIGEST = "6e84cb424d1b9f0c4ee45afb5d10cb17c771e0ae4e2291cd968abf6e50f67ec9"
"""Of seed 0, rows_max 6 and held_out 2; a change here is a change for every run that exists."""


def opened(source: str = SORT, *, seed: int = 0, base_dir: Path = Path(), **changes) -> TaskSet:
    return open_tasks(TasksSpec(source=source, **changes), seed, base_dir)


def a_jsonl(directory: Path, *prompts: str) -> Path:
    path = directory / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "a"}) + "\n" for p in prompts))
    return path


def test_every_input_of_the_built_in_task_is_in_exactly_one_split():
    tasks = opened(held_out=512)
    train, held_out = ({row.prompt for row in rows} for rows in (tasks.train, tasks.held_out))
    assert (len(train), len(held_out)) == (9488, 512)
    assert train | held_out == {f"{''.join(d)}>" for d in itertools.product("0123456789", repeat=4)}


def test_the_answer_of_the_built_in_task_is_the_sorted_digits():
    answers = {row.prompt: row.answer for row in opened().train}
    assert all("".join(sorted(prompt[:4])) == answer for prompt, answer in answers.items())


def test_the_same_seed_gives_the_same_rows_for_ever():
    tasks = opened(held_out=2, rows_max=6)
    assert [row.prompt for row in tasks.held_out] == HELD_OUT
    assert [row.prompt for row in tasks.train] == TRAIN
    assert tasks.digest == DIGEST


def test_another_seed_gives_another_order():
    assert opened(seed=0).digest != opened(seed=1).digest


def test_the_digest_depends_on_where_the_split_is():
    assert opened(held_out=2).digest != opened(held_out=3).digest


def test_a_digest_that_is_not_the_runs_is_refused_with_both():
    digest = opened().digest
    assert opened(digest=digest).digest == digest
    with pytest.raises(OperatorError, match=rf"{opened(seed=1).digest}.*{digest}"):
        opened(seed=1, digest=digest)


def test_rows_max_counts_both_splits():
    tasks = opened(rows_max=100, held_out=30)
    assert (len(tasks.train), len(tasks.held_out)) == (70, 30)


def test_a_repeated_prompt_is_never_in_both_splits(tmp_path):
    a_jsonl(tmp_path, *"ababababcc")
    tasks = opened("a.jsonl", base_dir=tmp_path, held_out=1)
    held = {row.prompt for row in tasks.held_out}
    assert held.isdisjoint(row.prompt for row in tasks.train)
    assert {row.reason for row in tasks.skipped} == {"the same prompt is held out"}
    assert len(tasks.train) + len(tasks.held_out) + len(tasks.skipped) == 10


def test_skipped_rows_are_kept_with_their_reason(tmp_path):
    a_jsonl(tmp_path, "a", "", "b")
    tasks = opened("a.jsonl", base_dir=tmp_path, held_out=0)
    assert tasks.skipped == (Skipped("a.jsonl line 2", "prompt is empty"),)


def test_strict_refuses_the_first_bad_row_and_names_its_line(tmp_path):
    a_jsonl(tmp_path, "a", "", "b")
    with pytest.raises(OperatorError, match=r"a\.jsonl line 2: prompt is empty"):
        opened("a.jsonl", base_dir=tmp_path, held_out=0, strict=True)


def test_a_file_without_a_usable_row_says_why(tmp_path):
    a_jsonl(tmp_path, "", "")
    with pytest.raises(OperatorError, match=r"no usable row: 2 skipped \(a\.jsonl line 1: prompt is empty"):
        opened("a.jsonl", base_dir=tmp_path)
    a_jsonl(tmp_path)
    with pytest.raises(OperatorError, match="no usable row"):
        opened("a.jsonl", base_dir=tmp_path)


def test_holding_out_everything_is_refused(tmp_path):
    a_jsonl(tmp_path, "a", "b")
    with pytest.raises(OperatorError, match=r"held_out is 2 but .* gives only 2 rows"):
        opened("a.jsonl", base_dir=tmp_path, held_out=2)


def test_a_file_whose_every_prompt_is_held_out_is_refused(tmp_path):
    a_jsonl(tmp_path, "a", "a", "a")
    with pytest.raises(OperatorError, match="every row has a prompt that is held out"):
        opened("a.jsonl", base_dir=tmp_path, held_out=1)


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("builtin:sortdigits", "did you mean builtin:sort-digits?"),
        ("reasoninggym:chain_sum", "did you mean reasoning-gym:chain_sum?"),
        ("gsm8k.json", "write builtin:sort-digits, <file>.jsonl, hf:"),
        ("hf:", "write builtin:sort-digits"),
        ("", "write builtin:sort-digits"),
    ],
)
def test_an_unknown_source_is_answered_with_the_forms_there_are(source, hint):
    with pytest.raises(OperatorError, match="is no task set") as refused:
        opened(source)
    assert hint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_many_skipped_rows_are_described_in_one_line():
    skipped = [Skipped(f"line {i}", "no answer") for i in range(5)]
    assert describe_skipped(skipped, shown=2) == (
        "5 skipped (line 0: no answer; line 1: no answer; and 3 more)"
    )
