"""Run files: what is wrong is said in one line that names the key, and every setting is in the digest."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from protocol.errors import OperatorError
from protocol.limits import COUNT_MAX
from protocol.runspec import ModelSpec, RunSpec
from tests.build import a_runspec

MINIMAL = """
name = "demo"
[model]
ref = "builtin:tiny"
[tasks]
source = "builtin:sort-digits"
[[rewards]]
name = "exact"
[store]
url = "file:///adapters"
"""


def fault_of(text: str) -> str:
    """What a person is told about a run file."""
    with pytest.raises(OperatorError) as caught:
        RunSpec.from_toml(text, "run.toml")
    line = str(caught.value)
    assert line.startswith("run.toml: ")
    assert line.isprintable()
    return line


def with_setting(table: str, setting: str) -> str:
    """The minimal file with a setting of ``table`` added or replaced."""
    key = setting.partition("=")[0].strip()
    lines, here = [], ""
    for line in MINIMAL.splitlines():
        here = line.strip("[]") if line.startswith("[") else here
        if not (here == table and line.partition("=")[0].strip() == key):
            lines.append(line)
    if not table:
        return "\n".join([setting, *lines])
    header = next((line for line in lines if line.startswith("[") and line.strip("[]") == table), None)
    if header is None:
        return "\n".join([*lines, f"[{table}]", setting])
    at = lines.index(header) + 1
    return "\n".join([*lines[:at], setting, *lines[at:]])


def test_the_shortest_run_file_is_a_run_with_the_good_defaults():
    spec = RunSpec.from_toml(MINIMAL, "run.toml")
    assert (spec.name, spec.rewards[0].name) == ("demo", "exact")
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k) == (1.0, 1.0, 0)
    assert spec.staleness.max_staleness == 4
    assert (spec.loss.clip_low, spec.loss.clip_high, spec.loss.kl_beta) == (0.2, 0.2, 0.0)
    assert spec.lora.target_modules == "all-linear"
    assert spec.model.revision is None


@pytest.mark.parametrize(
    ("table", "setting", "key"),
    [
        ("", "learning_rate = 1e-4", "learning_rate"),
        ("learner", "learning_rat = 1e-4", "learner.learning_rat"),
        ("model", "rank = 4", "model.rank"),
        ("loss", "kl_betta = 0.1", "loss.kl_betta"),
        ("nonsense", "a = 1", "nonsense"),
    ],
)
def test_an_unknown_setting_is_refused_by_its_name(table: str, setting: str, key: str):
    assert fault_of(with_setting(table, setting)) == f"run.toml: {key}: no such setting; check the spelling"


@pytest.mark.parametrize(
    ("table", "setting", "key"),
    [
        ("", "name = 7", "name"),
        ("", "name = 'Big Run'", "name"),
        ("", "name = 'a.b'", "name"),
        ("", "name = 1979-05-27", "name"),
        ("", "seed = -1", "seed"),
        ("", "seed = 4294967296", "seed"),
        ("", "seed = 1.0", "seed"),
        ("", "loss = 3", "loss"),
        ("learner", "updates = '500'", "learner.updates"),
        ("learner", "updates = 500.0", "learner.updates"),
        ("learner", "updates = true", "learner.updates"),
        ("learner", "updates = 0", "learner.updates"),
        ("learner", f"updates = {COUNT_MAX + 1}", "learner.updates"),
        ("learner", f"updates = {10**400}", "learner.updates"),
        ("learner", "learning_rate = '1e-4'", "learner.learning_rate"),
        ("learner", "learning_rate = nan", "learner.learning_rate"),
        ("learner", "learning_rate = inf", "learner.learning_rate"),
        ("learner", "learning_rate = 0.0", "learner.learning_rate"),
        ("learner", "schedule = 'linaer'", "learner.schedule"),
        ("learner", "beta2 = 1.0", "learner.beta2"),
        ("sampling", "group_size = 1", "sampling.group_size"),
        ("sampling", "group_size = 257", "sampling.group_size"),
        ("sampling", "temperature = 0", "sampling.temperature"),
        ("sampling", "top_p = 1.5", "sampling.top_p"),
        ("sampling", "max_new_tokens = 0", "sampling.max_new_tokens"),
        ("lora", "rank = 0", "lora.rank"),
        ("lora", "rslora = 'yes'", "lora.rslora"),
        ("lora", "target_modules = []", "lora.target_modules"),
        ("lora", "target_modules = [1]", "lora.target_modules"),
        ("loss", "log_ratio_max = -1", "loss.log_ratio_max"),
        ("loss", "aggregation = 'constant'", "loss"),
        ("loss", "aggregation_tokens = 8", "loss"),
        ("staleness", "max_staleness = -1", "staleness.max_staleness"),
        ("eval", "every = -1", "eval.every"),
        ("rewards", "weight = nan", "rewards.0.weight"),
        ("rewards", "timeout_s = 0", "rewards.0.timeout_s"),
        ("rewards", "name = ''", "rewards.0.name"),
        ("store", "url = 7", "store.url"),
        ("model", "dtype = 'int4'", "model.dtype"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(table: str, setting: str, key: str):
    assert fault_of(with_setting(table, setting)).startswith(f"run.toml: {key}")


@pytest.mark.parametrize("key", ["name", "ref", "source", "url"])
def test_a_missing_setting_is_named(key: str):
    text = "\n".join(line for line in MINIMAL.splitlines() if not line.startswith(f"{key} "))
    fault = fault_of(text if key != "name" else MINIMAL.replace('name = "demo"', ""))
    assert f"{key}: Field required" in fault


def test_a_run_without_rewards_or_with_one_twice_is_refused():
    assert "rewards" in fault_of(MINIMAL.replace('[[rewards]]\nname = "exact"', ""))
    assert "rewards" in fault_of("rewards = []\n" + MINIMAL.replace('[[rewards]]\nname = "exact"', ""))
    assert "each reward may be listed once" in fault_of(MINIMAL + '[[rewards]]\nname = "exact"\n')


def test_a_syntax_error_is_told_with_its_line():
    fault = fault_of(MINIMAL.replace('ref = "builtin:tiny"', "ref = builtin:tiny"))
    assert "not TOML" in fault
    assert "line 4" in fault
    assert "not TOML" in fault_of(MINIMAL + "[model]\n")


def test_several_faults_are_one_line_with_their_number():
    fault = fault_of(with_setting("learner", "updates = 0\nlearning_rate = 0.0\nnonsense = 1"))
    assert fault.endswith("(and 2 more)")


def test_a_key_of_many_lines_is_still_told_in_one():
    assert "no such setting" in fault_of('"two\\nlines\\u001b[31m" = 1\n' + MINIMAL)
    assert len(fault_of(f'"{"x" * 5000}" = 1\n' + MINIMAL)) < 300


def test_a_file_of_faults_without_end_is_told_by_their_number():
    assert fault_of("".join(f"k{i} = 1\n" for i in range(2000)) + MINIMAL) == "run.toml: 2000 faults"


def test_a_spec_survives_toml_and_json():
    spec = RunSpec.from_toml(with_setting("lora", "target_modules = ['q_proj', 'v_proj']"), "run.toml")
    assert spec.lora.target_modules == ("q_proj", "v_proj")
    again = RunSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert again.digest == spec.digest


def test_a_spec_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        a_runspec().learner.updates = 3


@pytest.mark.parametrize("setting", ["dropout = 0.05", "lora_dropout = 0.1"])
def test_dropout_is_refused_with_the_reason(setting: str):
    fault = fault_of(with_setting("lora", setting))
    assert fault.startswith("run.toml: lora: dropout is not supported")
    assert "ratio of fresh groups would not be 1" in fault


def test_rslora_scales_by_the_root_of_the_rank():
    scales = [
        a_runspec(lora={"rank": rank, "alpha": alpha, "rslora": True}).lora.scale
        for rank, alpha in ((16, 32), (64, 16), (4, 8))
    ]
    assert scales == [8.0, 2.0, 4.0]
    assert a_runspec(lora={"rank": 4, "alpha": 8}).lora.scale == 2.0


# --- the digest ---------------------------------------------------------------------------------


def leaves(
    model: BaseModel, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """Path, annotation and value of every setting."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*path, name))
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for i, item in enumerate(value):
                yield from leaves(item, (*path, name, i))
        else:
            yield (*path, name), field.annotation, value


def literals(annotation: Any) -> list[Any]:
    """Every word that an annotation allows."""
    found = list(get_args(annotation)) if get_origin(annotation) is Literal else []
    return found or [word for part in get_args(annotation) for word in literals(part)]


def others(annotation: Any, value: Any) -> list[Any]:
    """Values to try instead of ``value``."""
    if isinstance(value, bool):
        return [not value]
    candidates: list[Any] = [word for word in literals(annotation) if word != value]
    if isinstance(value, int | float):
        candidates += [value + 1, value / 2 + 0.125, value + 2]
    if isinstance(value, dict):
        held = next(iter(value.values()), None)
        candidates.append({"another": held.model_dump() if isinstance(held, BaseModel) else held})
    return [*candidates, "x", 3, 0.5, ["x"], "m:g", ["m:g"]]


def changed(spec: RunSpec, path: tuple[str | int, ...], value: Any) -> RunSpec | None:
    """``spec`` with another value at ``path``, or None if that is no spec."""
    body = json.loads(spec.model_dump_json())
    at = body
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    try:
        return RunSpec.model_validate(body)
    except ValidationError:
        return None


CHAT = {"source": "builtin:sort-digits"}
"""Prompts by the chat template, which users and tools need."""


def test_every_setting_changes_the_digest():
    bases = [
        a_runspec(),
        a_runspec(loss={"aggregation": "constant", "aggregation_tokens": 8}),
        a_runspec(tools={"functions": ["m:f"]}),
        a_runspec(tasks={"source": "verifiers:sums", "arguments": {"examples": 4}}),
        a_runspec(tasks=CHAT, user={"function": "m:f", "columns": ["goal"]}),
    ]
    settled: dict[tuple[str | int, ...], bool] = {}
    for base in bases:
        for path, annotation, value in leaves(base):
            variants = [changed(base, path, other) for other in others(annotation, value)]
            digests = [spec.digest for spec in variants if spec is not None and spec != base]
            settled[path] = settled.get(path, False) or bool(digests)
            assert base.digest not in digests, path
    settled["tools",] = settled["user",] = len({base.digest for base in bases}) == len(bases)
    assert [path for path, found in settled.items() if not found] == []
    assert len(settled) > 60


def test_the_digest_does_not_depend_on_how_the_settings_were_written():
    table = tomllib.loads(MINIMAL)
    backwards = dict(reversed(table.items()))
    assert RunSpec.model_validate(table).digest == RunSpec.model_validate(backwards).digest
    spelled_out = with_setting("learner", "learning_rate = 0.00004")
    assert RunSpec.from_toml(spelled_out, "a").digest == RunSpec.from_toml(MINIMAL, "b").digest
    assert RunSpec.from_toml(with_setting("lora", "alpha = 32"), "a") == RunSpec.from_toml(MINIMAL, "b")


def test_every_table_is_closed():
    for field in RunSpec.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            assert field.annotation.model_config["extra"] == "forbid"
    with pytest.raises(ValidationError):
        ModelSpec(ref="a", nonsense=1)  # type: ignore[call-arg]
