"""A Hugging Face dataset as a task set, from local copies: no network."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
import pytest

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.hf_dataset import parse_name, read
from roles.tasks.taskset import Row, Skipped

RECORDS = [
    {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
    {"question": "Half of 2,000?", "answer": "so\n#### 1,000"},
    {"question": "?", "answer": "I do not know"},
]


def a_spec(**changes) -> TasksSpec:
    fields = {"source": "hf:x", "prompt_column": "question", "answer_after": "####"}
    return TasksSpec.model_validate(fields | changes)


def rows_of(name: str, base_dir: Path, spec: TasksSpec | None = None) -> list[Row | Skipped]:
    return list(read(name, spec or a_spec(), base_dir))


def expected(name: str) -> list[Row | Skipped]:
    return [
        Row("6 * 7?", "42", f"{name} train row 0"),
        Row("Half of 2,000?", "1,000", f"{name} train row 1"),
        Skipped(f"{name} train row 2", "no '####' in the answer"),
    ]


def test_a_saved_dataset_is_read_with_the_answer_after_the_marker(tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    assert rows_of("./saved", tmp_path) == expected("./saved")


def test_the_split_is_taken_out_of_a_saved_dictionary(tmp_path):
    table = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "saved")
    assert rows_of("./saved", tmp_path) == expected("./saved")
    assert len(rows_of("./saved", tmp_path, a_spec(split="test"))) == 1
    with pytest.raises(OperatorError, match="split 'dev'"):
        rows_of("./saved", tmp_path, a_spec(split="dev"))


def test_a_parquet_file_is_read_where_it_lies(tmp_path):
    datasets.Dataset.from_list(RECORDS).to_parquet(tmp_path / "a.parquet")
    assert rows_of(f"{tmp_path}/a.parquet", Path()) == expected(f"{tmp_path}/a.parquet")


def test_a_missing_column_is_answered_with_the_columns_there_are(tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    with pytest.raises(OperatorError, match="no column 'prompt', only question, answer"):
        rows_of("./saved", tmp_path, a_spec(prompt_column="prompt"))


def test_a_missing_path_is_the_operators_mistake(tmp_path):
    with pytest.raises(OperatorError, match="there is no file or directory"):
        rows_of("./none", tmp_path)


def test_without_the_library_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OperatorError, match=r"pip install 'grpo-node\[datasets\]'"):
        rows_of("owner/name", tmp_path)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gsm8k", ("gsm8k", None, None)),
        ("openai/gsm8k", ("openai/gsm8k", None, None)),
        ("openai/gsm8k/main", ("openai/gsm8k", "main", None)),
        ("openai/gsm8k/main@e53f048", ("openai/gsm8k", "main", "e53f048")),
    ],
)
def test_a_name_has_owner_dataset_config_and_revision(name, parts):
    assert parse_name(name) == parts


@pytest.mark.parametrize("name", ["a/b/c/d", "a//b", "/", ""])
def test_a_name_with_too_many_or_empty_parts_is_refused(name):
    with pytest.raises(OperatorError, match="write hf:<owner>/<dataset>"):
        parse_name(name)
