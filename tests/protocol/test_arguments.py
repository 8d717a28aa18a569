"""Arguments of an environment in a run file: plain values, bounded, a part of what peers agree on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import OperatorError
from protocol.limits import ARGUMENTS_BYTES_MAX, ARGUMENTS_DEPTH_MAX, COUNT_MAX
from protocol.runspec import RunSpec
from tests.build import a_runspec

SOURCE = "verifiers:sums"
FILE = """
name = "demo"
[model]
ref = "builtin:tiny"
[tasks]
source = "verifiers:sums"
[tasks.arguments]
{arguments}
[[rewards]]
name = "{reward}"
[store]
url = "file:///adapters"
"""


def read(arguments: str = "", reward: str = SOURCE) -> RunSpec:
    return RunSpec.from_toml(FILE.format(arguments=arguments, reward=reward), "run.toml")


def fault_of(*words: str) -> str:
    with pytest.raises(OperatorError) as caught:
        read(*words)
    line = str(caught.value)
    assert line.startswith("run.toml: ")
    assert line.isprintable()
    return line.removeprefix("run.toml: ")


def with_arguments(arguments: Any) -> RunSpec:
    """The same by what a stranger's message holds."""
    body = json.loads(read().model_dump_json())
    body["tasks"]["arguments"] = arguments
    return RunSpec.model_validate_json(json.dumps(body))


def nested(depth: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for _ in range(depth - 1):
        table = {"a": table}
    return {"a": table}


def test_tables_lists_and_values_pass_as_they_are():
    said = 'hard = true\nshare = 0.5\nnumbers = [1, 2.0, "x"]\n[tasks.arguments.of]\n"any key" = {deep = 3}'
    wanted = {
        "hard": True,
        "share": 0.5,
        "numbers": [1, 2.0, "x"],
        "of": {"any key": {"deep": 3}},
    }
    spec = read(said)
    assert spec.tasks.arguments == wanted
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_arguments_are_a_part_of_what_peers_agree_on():
    specs = [
        read(),
        read("examples = 4"),
        read("examples = 5"),
        read("examples = 4.0"),
        read('examples = "4"'),
    ]
    assert len({spec.digest for spec in specs}) == len(specs)


def test_a_run_without_arguments_says_nothing_of_them():
    without = FILE.replace("[tasks.arguments]", "").format(arguments="", reward=SOURCE)
    assert read() == RunSpec.from_toml(without, "run.toml")
    assert "arguments" not in read().model_dump_json()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("day = 2026-01-01", "day: a date is no value of JSON; write it as a text"),
        ("[tasks.arguments.of]\nat = [[12:30:00]]", "of.at: a time is no value of JSON; write it as a text"),
        ("share = nan", "share: this number is not finite"),
        ("share = [-inf]", "share: this number is not finite"),
        (f"seed = {COUNT_MAX + 1}", "seed: this number is too large to be exact"),
    ],
)
def test_what_is_no_plain_value_is_told_by_its_place(said: str, told: str):
    assert fault_of(said) == f"tasks.arguments: {told}"


def test_arguments_that_are_no_table_are_told():
    with pytest.raises(ValidationError, match="this is a table"):
        with_arguments([1])


def test_arguments_are_as_deep_and_as_long_as_the_limits_say():
    deepest = nested(ARGUMENTS_DEPTH_MAX)
    assert with_arguments(deepest).tasks.arguments == deepest
    longest = {"a": "x" * (ARGUMENTS_BYTES_MAX - len('{"a": ""}'))}
    assert with_arguments(longest).tasks.arguments == longest


@pytest.mark.parametrize(
    "hostile",
    [
        nested(ARGUMENTS_DEPTH_MAX + 1),
        nested(150),
        nested(100_000),
        {"a": "x" * ARGUMENTS_BYTES_MAX},
        {str(i): i for i in range(ARGUMENTS_BYTES_MAX // 4)},
        {"a": [[]] * ARGUMENTS_BYTES_MAX},
        {"x" * ARGUMENTS_BYTES_MAX: 1},
        {"\n\x1b[2J" * 100: 10**400},
    ],
    ids=["deep", "deeper", "deepest", "long", "wide", "many", "a long key", "a rude key"],
)
def test_a_strangers_table_stays_bounded_and_is_refused_in_one_line(hostile: dict[str, Any]):
    body = json.loads(read().model_dump_json())
    body["tasks"]["arguments"] = hostile
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(body)
    (fault,) = caught.value.errors(include_url=False, include_input=False, include_context=False)
    assert fault["loc"] == ("tasks", "arguments")
    assert len(fault["msg"]) < 300
    assert fault["msg"].isprintable()


def test_arguments_without_an_environment_are_refused():
    with pytest.raises(ValidationError, match="arguments are for a source verifiers:<environment>, and only"):
        a_runspec(tasks={"source": "builtin:sort-digits", "arguments": {"a": 1}})


def test_a_reward_of_another_environment_than_the_tasks_is_refused():
    """It could not score anything, and would have to be given arguments that are not its own."""
    assert fault_of("", "verifiers:powers") == (
        "the file: reward verifiers:powers scores tasks of its own environment only, so tasks.source must be "
        "the same text; it is verifiers:sums"
    )
