"""Every run file in examples/ is valid, and what belongs to it is there and says what it promises."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from examples import arithmetic
from examples.rewards import last_number
from protocol.runspec import RunSpec, TasksSpec
from roles.tasks.hf_dataset import parse_name
from roles.tasks.open import open_tasks

ROOT = Path(__file__).resolve().parents[2]
RUN_FILES = sorted((ROOT / "examples").glob("*.toml"))


def spec_of(path: Path) -> RunSpec:
    return RunSpec.from_toml(path.read_text(), path.name)


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_a_run_file_is_valid_and_each_has_a_name_and_a_store_of_its_own(path):
    spec = spec_of(path)
    others = [spec_of(other) for other in RUN_FILES if other != path]
    assert spec.name not in {other.name for other in others}
    assert spec.store.url not in {other.store.url for other in others}


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_the_template_of_a_run_file_leaves_the_assistants_turn_open(path):
    template = spec_of(path).tasks.template
    assert template is not None
    text = template.format(prompt="PROMPT")
    assert text.startswith("<|im_start|>user\n")
    assert "PROMPT" in text
    assert "<|im_end|>" not in text.partition("<|im_start|>assistant\n")[2]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_the_source_of_a_run_file_is_in_the_repository_or_a_well_formed_name(path):
    tasks = spec_of(path).tasks
    scheme, _, name = tasks.source.partition(":")
    if scheme == "hf":
        assert parse_name(name)[0]
    else:
        assert open_tasks(tasks, 0, ROOT).train


def test_the_arithmetic_problems_are_what_their_script_writes_and_right():
    path = Path(arithmetic.__file__).with_suffix(".jsonl")
    tasks = open_tasks(TasksSpec(source=str(path), held_out=0), 0, ROOT)
    rows = {row.prompt: row.answer for row in tasks.train}
    assert rows == {problem["prompt"]: problem["answer"] for problem in arithmetic.problems()}
    assert all(sum(map(int, prompt.split(" + "))) == int(answer) for prompt, answer in rows.items())
    assert len(rows) == 144
    assert not tasks.skipped


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("7 + 5 is 12.", "12", 1.0),
        ("12, or 13", "12", 0.0),
        ("I do not know", "12", 0.0),
        ("", "12", 0.0),
        ("it is -3", "-3", 1.0),
        ("it is 03", "3", 1.0),
    ],
)
def test_the_example_reward_judges_the_last_number(completion, answer, reward):
    assert last_number(completion, answer) == reward


def test_the_model_script_can_be_found_where_the_run_file_says():
    assert importlib.util.find_spec("examples.smollm2") is not None
    text = (ROOT / "examples" / "smollm2-arithmetic.toml").read_text()
    assert "python examples/smollm2.py" in text
    assert spec_of(ROOT / "examples" / "smollm2-arithmetic.toml").model.ref == (
        "./.grpo/models/smollm2-135m-instruct"
    )
