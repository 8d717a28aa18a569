"""What leaves the task set for a simulated user: the prompt and named columns, and never the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.clock import GENESIS
from protocol.codec import decode_as, encode
from protocol.errors import OperatorError
from protocol.limits import TOLD_BYTES_MAX
from protocol.messages import Task, Told
from protocol.runspec import TasksSpec
from protocol.user_spec import UserSpec
from roles.learner.evaluation import eval_tasks
from roles.learner.issuer import TaskStream
from roles.tasks.open import open_tasks
from roles.tasks.prompts import Prompt, PromptBuilder
from tests.build import a_runspec, an_identity
from tests.roles.turns.chat import a_character_tokenizer

GOLD = "GOLD-4711"
LINES = [
    f'{{"question": "2+3", "solution": "{GOLD}", "goal": "be fast", "turns": 3, "hint": "{GOLD}"}}',
    f'{{"question": "4+5", "solution": "{GOLD}", "turns": [1, "é"], "hint": "{GOLD}"}}',
]
USER = UserSpec(function="m:f", columns=("turns",))
TASKS = {"source": "rows.jsonl", "prompt_column": "question", "answer_column": "solution", "held_out": 0}


def prompts(directory: Path, user: UserSpec | None, *lines: str) -> tuple[tuple[Prompt, ...], list[str]]:
    """The prompts that are used, and why the others are not."""
    (directory / "rows.jsonl").write_text("\n".join(lines or LINES))
    spec = TasksSpec.model_validate(TASKS | {"system_prompt": "Be short."})
    tasks = open_tasks(spec, 0, directory)
    builder = PromptBuilder(a_character_tokenizer(), spec, None, user)
    selection = builder.select(tasks.train, context_tokens=TOLD_BYTES_MAX * 4, max_new_tokens=1)
    return selection.prompts, [skipped.reason for skipped in selection.skipped]


def test_the_prompt_and_the_named_columns_are_told_as_text(tmp_path: Path):
    found, _ = prompts(tmp_path, USER)
    assert {prompt.told for prompt in found} == {
        Told(prompt="2+3", system_prompt="Be short.", columns={"turns": "3"}),
        Told(prompt="4+5", system_prompt="Be short.", columns={"turns": '[1, "é"]'}),
    }


def test_a_run_without_a_user_tells_nothing(tmp_path: Path):
    assert {prompt.told for prompt in prompts(tmp_path, None)[0]} == {None}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_neither_the_answer_nor_a_column_that_is_not_named_is_in_the_task(tmp_path: Path, split: str):
    """Of the frame itself, which is all that a sampler and its user's function get."""
    found, _ = prompts(tmp_path, USER)
    spec = a_runspec(tasks=TASKS, user=USER.model_dump())
    stream = TaskStream(spec, "learner-1", found)
    tasks = [stream.task(0, GENESIS)] if split == "train" else eval_tasks(spec, found, GENESIS)
    for task in tasks:
        frame = encode(task, an_identity("learner-1"))
        assert decode_as(frame, Task).told == task.told is not None
        assert b"turns" in frame
        assert GOLD.encode() not in frame
        assert b"goal" not in frame


def test_a_row_without_a_named_column_is_skipped(tmp_path: Path):
    found, skipped = prompts(tmp_path, UserSpec(function="m:f", columns=("goal",)))
    assert [prompt.told and prompt.told.columns for prompt in found] == [{"goal": "be fast"}]
    assert skipped == ["no column 'goal', which user.columns names"]


def test_a_column_that_no_row_has_is_refused(tmp_path: Path):
    with pytest.raises(OperatorError, match=r"no prompt fits.*no column 'mood', which user.columns names"):
        prompts(tmp_path, UserSpec(function="m:f", columns=("mood",)))


def test_a_row_of_which_too_much_would_be_told_is_skipped(tmp_path: Path):
    long = f'{{"question": "6+7", "solution": "1", "turns": "{"x" * TOLD_BYTES_MAX}"}}'
    _, skipped = prompts(tmp_path, USER, *LINES, long)
    assert len(skipped) == 1
    assert "and the limit is 65536" in skipped[0]
