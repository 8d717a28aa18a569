"""A JSONL task set: what is used, what is skipped, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.jsonl import read
from roles.tasks.taskset import Row, Skipped

SPEC = TasksSpec(source="a.jsonl")


def a_file(directory: Path, content: bytes) -> Path:
    path = directory / "a.jsonl"
    path.write_bytes(content)
    return path


def the_only(directory: Path, content: bytes, spec: TasksSpec = SPEC) -> Row | Skipped:
    (row,) = read(a_file(directory, content), spec)
    return row


def test_bad_lines_are_skipped_with_their_number_and_a_whole_number_becomes_its_digits(tmp_path):
    """Case A30."""
    lines = [
        b'\xef\xbb\xbf{"prompt": "1+1", "answer": "2"}',
        b'{"prompt": "1+2"}',
        b'{"prompt": null, "answer": "3"}',
        b'{"prompt": "", "answer": "3"}',
        b'{"prompt": "5+5", "answer": 10}',
        b'{"prompt": "\xff", "answer": "3"}',
    ]
    assert list(read(a_file(tmp_path, b"\r\n".join(lines)), SPEC)) == [
        Row("1+1", "2", "a.jsonl line 1"),
        Skipped("a.jsonl line 2", "no answer"),
        Skipped("a.jsonl line 3", "prompt is null"),
        Skipped("a.jsonl line 4", "prompt is empty"),
        Row("5+5", "10", "a.jsonl line 5"),
        Skipped("a.jsonl line 6", "byte 0xFF at column 13 is not UTF-8"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"prompt": "p", "answer": true}', "answer is a bool"),
        (b'{"prompt": "p", "answer": ["a"]}', "answer is a list"),
        (b'{"prompt": "p", "answer": " "}', "answer is empty"),
        (b'{"prompt": 5, "answer": "a"}', "prompt is a int"),
        (b'{"prompt": "\\ud800", "answer": "a"}', "prompt is not valid Unicode"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "p", "answer": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_an_unusable_line_is_skipped_with_the_reason(tmp_path, line, reason):
    row = the_only(tmp_path, line)
    assert isinstance(row, Skipped)
    assert row.reason.startswith(reason)


def test_empty_lines_are_nothing_to_report_and_still_count(tmp_path):
    rows = list(read(a_file(tmp_path, b'\n\n{"prompt": "p", "answer": "a"}\n\n'), SPEC))
    assert rows == [Row("p", "a", "a.jsonl line 3")]


def test_other_fields_become_metadata(tmp_path):
    row = the_only(tmp_path, b'{"prompt": "p", "answer": "a", "level": 3}')
    assert isinstance(row, Row)
    assert row.metadata == {"level": 3}


def test_columns_may_have_other_names(tmp_path):
    spec = TasksSpec(source="a.jsonl", prompt_column="q", answer_column="a")
    assert the_only(tmp_path, b'{"q": "p", "a": 1}', spec) == Row("p", "1", "a.jsonl line 1")
    assert the_only(tmp_path, b'{"q": "p"}', spec) == Skipped("a.jsonl line 1", "no answer (column 'a')")


def test_the_answer_may_stand_after_a_marker(tmp_path):
    spec = TasksSpec(source="a.jsonl", answer_after="####")
    row = the_only(tmp_path, json.dumps({"prompt": "p", "answer": "6*7 #### no\n#### 42"}).encode(), spec)
    assert row == Row("p", "42", "a.jsonl line 1")
    skipped = the_only(tmp_path, b'{"prompt": "p", "answer": "42"}', spec)
    assert skipped == Skipped("a.jsonl line 1", "no '####' in the answer")


def test_a_missing_file_and_a_directory_are_the_operators_mistake(tmp_path):
    with pytest.raises(OperatorError, match="there is no file"):
        list(read(tmp_path / "none.jsonl", SPEC))
    with pytest.raises(OperatorError, match="cannot read"):
        list(read(tmp_path, SPEC))
