"""Tasks of a verifiers environment as rows: read in another process, found again by number and content."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.environment import environment_module
from roles.tasks.open import open_tasks
from roles.tasks.reasoning_gym import ANY_ANSWER
from roles.tasks.taskset import Row, TaskSet
from tests.roles.environments import FOLDER

pytest.importorskip(
    "verifiers.v1", reason="the verifiers library is not installed: pip install '.[verifiers]'"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
"""The library takes seconds to import, in each process that opens an environment."""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def opened(source: str, **fields: Any) -> TaskSet:
    spec = TasksSpec.model_validate({"source": source, "held_out": 1} | fields)
    return open_tasks(spec, 0, Path.cwd())


def all_rows(tasks: TaskSet) -> list[Row]:
    return sorted([*tasks.held_out, *tasks.train], key=lambda row: row.metadata["environment_task"])


def test_prompts_answers_and_system_prompts_are_those_of_the_tasks():
    rows = all_rows(opened("verifiers:sums"))
    assert [(row.prompt, row.answer) for row in rows] == [
        (f"What is {i} + {i}?", str(2 * i)) for i in range(5)
    ]
    assert {row.system_prompt for row in rows} == {"Be short."}
    assert rows[3].origin == "verifiers:sums 3"


def test_rows_are_the_same_each_time_and_their_module_stays_out_of_this_process():
    first, second = opened("verifiers:sums"), opened("verifiers:sums")
    assert first.digest == second.digest
    assert all_rows(first) == all_rows(second)
    assert "sums" not in sys.modules


def test_of_an_environment_without_end_as_many_as_are_asked_for_are_read():
    rows = all_rows(opened("verifiers:calculators", rows_max=7))
    assert [row.prompt for row in rows] == ["0+0", "1+0", "2+0", "3+0", "4+0", "0+1", "1+1"]
    assert {row.answer for row in rows} == {ANY_ANSWER}


def test_tasks_that_need_more_than_a_text_are_skipped_and_counted(tmp_path, monkeypatch):
    (tmp_path / "odd_tasks.py").write_text(
        "import verifiers.v1 as vf\n"
        "class Boxed(vf.Task[vf.TaskData]):\n"
        "    NEEDS_CONTAINER = True\n"
        "class Odd(vf.Taskset[vf.Task, vf.TasksetConfig]):\n"
        "    def load(self):\n"
        "        user = dict(role='user', content='hi')\n"
        "        system = dict(role='system', content='be')\n"
        "        said = dict(role='assistant', content='x')\n"
        "        for prompt in ('a', 'b', [system, user], [user, said, user], ' ', None):\n"
        "            yield vf.Task(vf.TaskData(prompt=prompt))\n"
        "        yield Boxed(vf.TaskData(prompt='c'))\n"
        "__all__ = ['Odd']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = opened("verifiers:odd-tasks")
    rows = all_rows(tasks)
    assert [(row.prompt, row.system_prompt) for row in rows] == [("a", None), ("b", None), ("hi", "be")]
    assert [skipped.reason for skipped in tasks.skipped] == [
        "its prompt has messages of user, assistant, user",
        "its prompt is empty",
        "its prompt is no text",
        "it needs a container",
    ]


FAILING = """
import verifiers.v1 as vf
class A(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="a"))
        raise KeyError("gone")
__all__ = ["A"]
"""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "cannot be opened: AttributeError"),
        ("import no_such_library", "cannot be opened: ModuleNotFoundError"),
        ("__all__ = []", "cannot be opened: TypeError"),
        ("import os; os._exit(3)", "its process ended"),
        (FAILING, "its process ended: KeyError: 'gone'"),
    ],
)
def test_what_cannot_be_opened_is_told_in_one_line(tmp_path, monkeypatch, code: str, why: str):
    (tmp_path / "broken_env.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OperatorError, match=why) as told:
        opened("verifiers:broken-env")
    assert "\n" not in str(told.value)


def test_an_environment_that_is_not_installed_is_told():
    with pytest.raises(OperatorError, match="verifiers:nobody-has-this cannot be opened"):
        opened("verifiers:nobody-has-this")


@pytest.mark.parametrize("name", ["owner/env", "env@1.0", "a.b", "../x", "", "1a"])
def test_nothing_is_fetched_because_a_run_names_it(name: str):
    with pytest.raises(OperatorError, match="name an environment that is installed"):
        environment_module(name)
