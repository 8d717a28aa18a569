"""The ``verifiers:`` reward: what an environment's own tasks say, of one turn and of conversations."""

from __future__ import annotations

import functools
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec, TasksSpec
from roles.tasks.open import open_tasks
from roles.tasks.taskset import Row
from roles.verifier.rewards.registry import Place, open_reward, place_of, user_modules
from roles.verifier.rewards.reward import Item
from roles.verifier.rewards.scorer import Scored, Scorer
from tests.roles.environments import FOLDER
from tests.roles.environments.pool import scored

pytest.importorskip(
    "verifiers.v1", reason="the verifiers library is not installed: pip install '.[verifiers]'"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
"""The library takes seconds to import, in each process that opens an environment."""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def a_reward(name: str, **fields: Any) -> RewardSpec:
    return RewardSpec(name=f"verifiers:{name}", **({"timeout_s": 20.0} | fields))


@functools.cache
def rows_of(name: str, rows_max: int | None = None) -> list[Row]:
    spec = TasksSpec(source=f"verifiers:{name}", held_out=1, rows_max=rows_max)
    tasks = open_tasks(spec, 0, Path.cwd())
    return sorted([*tasks.held_out, *tasks.train], key=lambda row: row.metadata["environment_task"])


def an_item(row: Row, completion: str, conversation: Any = ()) -> Item:
    return Item(completion, row.answer, row.prompt, row.metadata, conversation)


def outcome(one: Scored) -> tuple[float | None, Unscorable | None]:
    return one.reward, one.unscorable


async def test_rewards_are_summed_by_the_tasks_own_weights_and_then_by_the_runs():
    row = rows_of("sums")[4]
    items = [an_item(row, text) for text in ("8", "81", " 8 ", "nine")]
    by_task = [1 + 0.25, 0.25 / 2, 1 + 0.25, 0.25 / 4]
    found = await scored(items, a_reward("sums", weight=2.0), RewardSpec(name="exact", weight=10.0))
    exact = [1.0, 0.0, 1.0, 0.0]
    assert [one.reward for one in found] == pytest.approx(
        [2 * t + 10 * e for t, e in zip(by_task, exact, strict=True)]
    )
    assert [one.scores["verifiers:sums"] for one in found] == pytest.approx(by_task)


async def test_each_row_is_scored_by_the_task_it_was_read_from():
    async with Scorer([a_reward("sums")], workers=1) as scorer:
        found = [(await scorer.score([an_item(row, "4")]))[0].reward for row in rows_of("sums")]
    assert found == pytest.approx([0.25, 0.25, 1.25, 0.25, 0.25])


async def test_a_task_that_raises_is_not_zero():
    row = rows_of("sums")[4]
    (found,) = await scored([an_item(row, "")], a_reward("sums"))
    assert outcome(found) == (None, Unscorable.REWARD_FAILED)
    assert "ZeroDivisionError" in found.note or "division" in found.note


async def test_a_row_of_somewhere_else_and_a_task_that_changed_are_no_answer():
    row = rows_of("sums")[1]
    other = {**row.metadata, "environment": "calculators"}
    changed = {**row.metadata, "environment_task_hash": "0" * 64}
    gone = {**row.metadata, "environment_task": 99}
    items = [Item("2", row.answer, row.prompt, metadata) for metadata in (other, changed, gone, {})]
    found = await scored(items, a_reward("sums"))
    assert [outcome(one) for one in found] == [(None, Unscorable.NO_ANSWER)] * 4


def a_conversation(a: int, b: int, reply: str, answer: str) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": reply},
        {"role": "assistant", "content": answer},
    ]


async def test_a_rollout_of_two_turns_with_a_tool_is_scored_as_the_conversation_it_was():
    row = rows_of("calculators", 25)[17]
    assert row.prompt == "2+3"
    conversations = [
        a_conversation(2, 3, "5", "5"),
        a_conversation(2, 3, "5", "6"),
        a_conversation(2, 2, "4", "5"),
        [{"role": "assistant", "content": "5"}],
    ]
    items = [an_item(row, said[-1]["content"], said) for said in conversations]
    found = await scored(items, a_reward("calculators"))
    assert [one.reward for one in found] == [1.5, 0.5, 1.0, 1.0]


EVIL = """
import os, socket, verifiers.v1 as vf
from pathlib import Path
opened_with = Path({secret!r}).read_text()
class Evil(vf.Task[vf.TaskData]):
    @vf.reward
    async def reach(self, trace: vf.Trace) -> float:
        if trace.last_reply == "file":
            return float(len(Path({secret!r}).read_text()))
        if trace.last_reply == "network":
            socket.create_connection(("127.0.0.1", {port}), 1)
        if trace.last_reply == "hang":
            while True: pass
        return 1.0
class Tasks(vf.Taskset[Evil, vf.TasksetConfig]):
    def load(self): return [Evil(vf.TaskData(prompt=p)) for p in "ab"]
__all__ = ["Tasks"]
"""


async def test_an_environment_is_opened_with_its_operators_rights_and_scores_without(tmp_path, monkeypatch):
    package, secret = tmp_path / "package", tmp_path / "secret.txt"
    package.mkdir()
    secret.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        await evil(package, secret, server.getsockname()[1], monkeypatch)


async def evil(package: Path, secret: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "evil_env.py").write_text(EVIL.format(secret=str(secret), port=port))
    monkeypatch.syspath_prepend(str(package))
    row = rows_of("evil-env")[0]
    items = [an_item(row, text) for text in ("fine", "file", "network", "hang")]
    fine, *reached, hanging = await scored(items, a_reward("evil-env", timeout_s=2.0))
    assert fine.reward == 1.0
    assert [outcome(one) for one in reached] == [(None, Unscorable.REWARD_FAILED)] * 2
    assert (hanging.reward, hanging.note) == (0.0, "timeout")


NEEDY = """
import verifiers.v1 as vf
class Needy(vf.Task[vf.TaskData]):
    @vf.reward
    async def ran(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0
class Tasks(vf.Taskset[Needy, vf.TasksetConfig]):
    def load(self): return [Needy(vf.TaskData(prompt=p)) for p in "ab"]
__all__ = ["Tasks"]
"""


async def test_a_reward_that_needs_the_librarys_runtime_cannot_be_scored(tmp_path, monkeypatch):
    (tmp_path / "needy_env.py").write_text(NEEDY)
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = await scored([an_item(rows_of("needy-env")[0], "x")], a_reward("needy-env"))
    assert outcome(found) == (None, Unscorable.REWARD_FAILED)
    assert "ran needs the library's runtime" in found.note


def test_an_environment_is_a_persons_module_and_its_rewards_run_confined():
    specs = [a_reward("my-env"), RewardSpec(name="mine:f"), RewardSpec(name="math")]
    assert user_modules(specs) == ["mine", "my_env"]
    assert place_of("verifiers:my-env") is Place.LOADED
    assert Place.LOADED.confined


async def test_an_environment_that_is_not_there_is_told_before_anything_starts():
    with pytest.raises(OperatorError, match="verifiers:nobody cannot be opened"):
        open_reward(a_reward("nobody"))
    with pytest.raises(OperatorError, match="verifiers:nobody cannot be opened"):
        await Scorer([a_reward("nobody")]).open()
