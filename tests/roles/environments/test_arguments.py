"""An environment with arguments: the same ones for its tasks and its rewards, and only its author's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.runs import pin_run
from protocol.errors import OperatorError
from protocol.runspec import RewardSpec, RunSpec, TasksSpec
from roles.tasks.open import open_tasks
from roles.tasks.taskset import TaskSet
from roles.verifier.rewards.reward import Item
from roles.verifier.rewards.scorer import Scored, Scorer
from tests.build import a_runspec
from tests.roles.environments import FOLDER

pytest.importorskip(
    "verifiers.v1", reason="the verifiers library is not installed: pip install '.[verifiers]'"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
"""The library takes seconds to import, in each process that opens an environment."""

POWERS = "verifiers:powers"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def read(source: str = POWERS, **arguments: Any) -> TaskSet:
    spec = TasksSpec(source=source, held_out=1, arguments=arguments)
    return open_tasks(spec, 0, Path.cwd())


def rows(tasks: TaskSet) -> dict[str, str]:
    return {row.prompt: row.answer for row in (*tasks.held_out, *tasks.train)}


async def scored(tasks: TaskSet, **arguments: Any) -> list[Scored]:
    """Each task answered rightly, at a verifier with ``arguments``."""
    items = [Item(row.answer, row.answer, row.prompt, row.metadata) for row in tasks.train]
    reward = RewardSpec(name=POWERS, timeout_s=20.0)
    async with Scorer([reward], workers=1, arguments=arguments) as scorer:
        return await scorer.score(items)


def test_other_arguments_are_other_tasks():
    assert rows(read()) == {"0^2": "0", "1^2": "1", "2^2": "4", "3^2": "9"}
    others = read(exponent=3, examples=2, bases={"start": 2, "steps": [1, 2]})
    assert rows(others) == {"2^3": "8", "5^3": "125"}


async def test_rewards_are_those_of_the_tasks_that_these_arguments_give():
    arguments: dict[str, Any] = {"exponent": 3, "task": {"right": 2.5}}
    cubes = read(**arguments)
    assert [one.reward for one in await scored(cubes, **arguments)] == [2.5] * 3
    assert [one.reward for one in await scored(cubes, exponent=3)] == [1.0] * 3
    notes = {one.note for one in await scored(cubes) if one.reward is None}
    assert notes, "tasks of other arguments are not scored as if they were the same"
    assert all("is another one each time" in note for note in notes)


BY_THE_LIBRARY = "a run sets only what the environment's author added"
WRONG = [
    ({"exponents": 2}, "exponents: no such setting; check the spelling; it takes bases, examples, exponent"),
    ({"exponent": 4}, "exponent: Input should be 2 or 3"),
    ({"examples": "many"}, "examples: Input should be a valid integer"),
    ({"examples": 0}, "examples: Input should be greater than or equal to 1"),
    ({"bases": {"start": 1, "stop": 3}}, "bases.stop: no such setting"),
    ({"bases": {"steps": [1, "two"]}}, "bases.steps.1: Input should be a valid integer"),
    ({"id": "another"}, f"id: {BY_THE_LIBRARY}"),
    ({"system_prompt": "/etc/passwd"}, f"system_prompt: {BY_THE_LIBRARY}"),
    ({"task": {"rewards": {"mine": {"fn": "os:getcwd"}}}}, f"task.rewards: {BY_THE_LIBRARY}"),
    ({"task": {"judges": [{"id": "another"}]}}, f"task.judges: {BY_THE_LIBRARY}"),
]


@pytest.mark.parametrize(("arguments", "told"), WRONG, ids=[str(arguments) for arguments, _ in WRONG])
def test_a_wrong_argument_is_one_line_for_who_reads_the_tasks(arguments: dict[str, Any], told: str):
    with pytest.raises(OperatorError) as caught:
        read(**arguments)
    assert str(caught.value).startswith(f"tasks.source {POWERS}: tasks.arguments.{told}")
    assert str(caught.value).isprintable()


async def test_a_wrong_argument_is_one_line_at_a_verifier_before_it_scores():
    with pytest.raises(OperatorError, match=r"^verifiers:powers: tasks\.arguments\.exponent: Input"):
        await Scorer([RewardSpec(name=POWERS)], 1, {"exponent": "x"}).open()


def a_run(store: Path, **arguments: Any) -> RunSpec:
    tasks = {"source": POWERS, "held_out": 1, "arguments": arguments}
    return a_runspec(tasks=tasks, rewards=[{"name": POWERS}], store={"url": store.as_uri()})


def test_create_reads_tasks_and_opens_rewards_with_the_arguments_of_the_run(tmp_path: Path):
    pinned = {
        exponent: pin_run(a_run(tmp_path, exponent=exponent), tmp_path, checked=True) for exponent in (2, 3)
    }
    assert pinned[2].tasks.digest != pinned[3].tasks.digest
    assert pinned[3].tasks.arguments == {"exponent": 3}
    with pytest.raises(OperatorError, match=r"tasks\.arguments\.exponent: Input should be 2 or 3"):
        pin_run(a_run(tmp_path, exponent=4), tmp_path)


NESTING = """
import verifiers.v1 as vf
from verifiers.v1.configs.judge import JudgeConfig
class Config(vf.TasksetConfig):
    judge: JudgeConfig | None = None
    named: dict[str, list[vf.TaskConfig]] = {}
class Tasks(vf.Taskset[vf.Task, Config]):
    def load(self): return [vf.Task(vf.TaskData(prompt=p)) for p in "ab"]
__all__ = ["Tasks"]
"""


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"judge": {"id": "another"}}, "judge.id"),
        ({"named": {"rewards": [{"rewards": {"mine": {"fn": "os:getcwd"}}}]}}, "named.rewards.rewards"),
    ],
)
def test_settings_of_the_library_are_refused_wherever_an_author_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], where: str
):
    (tmp_path / "nesting_env.py").write_text(NESTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert rows(read("verifiers:nesting-env", named={"rewards": []})).keys() == {"a", "b"}
    with pytest.raises(OperatorError) as caught:
        read("verifiers:nesting-env", **arguments)
    assert f"tasks.arguments.{where}: {BY_THE_LIBRARY}" in str(caught.value)
