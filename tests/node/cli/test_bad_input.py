"""Whatever a person gets wrong: one line that says what to do, and a non-zero exit."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from node.settings import read_environment
from tests.command import command

RUN_FILE = """
name = "sums"
rewards = [{ name = "exact" }]
[model]
ref = "builtin:tiny"
[tasks]
source = "builtin:sort-digits"
template = "{prompt}"
[sampling]
max_new_tokens = 5
[store]
url = "store"
"""

SAMPLER = ("--role", "sampler", "--run", "x", "--broker", "nats://127.0.0.1:1")

Fails = Callable[..., str]


@pytest.fixture
def fails(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fails:
    """Run a command that must fail; returns its one line on standard error."""
    for name in ("GRPO_BROKER", "GRPO_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    # A home of its own, but the tiny model of the real one: it takes seconds to make.
    (tmp_path / "home").mkdir()
    models = read_environment().places.models
    models.mkdir(parents=True, exist_ok=True)
    (tmp_path / "home" / "models").symlink_to(models)
    monkeypatch.setenv("GRPO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    run = command(capfd)

    def failed(*arguments: str) -> str:
        said = run(*arguments)
        assert said.code == 2
        return said.line

    return failed


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[[str, str], str]:
    """A run file in which ``old`` is replaced by ``new``."""

    def write(old: str = "", new: str = "") -> str:
        assert old in RUN_FILE
        path = tmp_path / "run.toml"
        path.write_text(RUN_FILE.replace(old, new) if old else RUN_FILE)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--role", "sampler"], "--run NAME"),
        (["--role", "sampler", "--run", "x"], "--broker URL"),
        (["--role", "trainer", "--run", "x", "--broker", "nats://127.0.0.1:1"], "roles are learner, sampler"),
        (["--run", "x", "--broker", "nats://127.0.0.1:1"], "at least one --role"),
        (["--role", "sampler", "--run", "x", "--broker", "127.0.0.1:4222"], "nats://"),
        (["--role", "sampler", "--run", "x", "--broker", "b", "--threads", "0"], "--threads"),
        (["--role", "sampler", "--run", "X y", "--broker", "nats://127.0.0.1:1"], "--run"),
        (["--role", "sampler", "--run", "x", "--broker", "nats://127.0.0.1:1", "--name", "Ä"], "--name"),
        (["--role", "sampler", "--run", "x", "--broker", "nats://127.0.0.1:1", "--log", "loud"], "--log"),
        (["--role", "sampler", "demo"], "do not go with a command"),
        (["--rolle", "sampler"], "--rolle"),
        (["dmeo"], "dmeo"),
        (["demo", "--updates", "3"], "--updates"),
        (["demo", "--seed", "x"], "--seed"),
        (["up"], "file"),
        (["up", "nothing.toml"], "nothing.toml"),
        (["up", "nothing.toml", "--engine", "llama"], "--engine is one of transformers, vllm"),
        (["up", "nothing.toml", "--engine", "transformers", "--vllm-command", "x"], "go with --engine vllm"),
        (["create", "nothing.toml", "--broker", "nats://127.0.0.1:1"], "nothing.toml"),
        (["create", "nothing.toml"], "--broker URL"),
        (["status", "x"], "--broker URL"),
        (["broker", "--port", "99999"], "--port"),
        ([*SAMPLER, "--engine", "llama"], "--engine is one of transformers, vllm"),
        ([*SAMPLER, "--engine", "transformers", "--vllm-url", "http://x"], "go with --engine vllm"),
        ([*SAMPLER, "--vllm-url", "x:8000"], "write http://host:8000"),
        ([*SAMPLER, "--vllm-url", "http://x", "--vllm-command", "vllm serve"], "use one"),
        (["adapters", "try", "nowhere", "hello"], "adapter_config.json"),
        (["adapters", "list", "nowhere"], "nowhere"),
        (["adapters", "list", "nats://"], "--run NAME"),
        (["adapters", "list", "nats://", "--run", "x"], "--broker URL"),
        (["adapters", "list", "hf://me"], "hf://buckets/NAMESPACE/BUCKET"),
        (["adapters", "fetch", "nowhere", "x/exports/1", "--to", "."], "choose another directory"),
    ],
)
def test_bad_arguments_are_one_line(fails: Fails, arguments: list[str], says: str):
    assert says in fails(*arguments)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "sums"', 'name = "Sums"', "name"),
        ('name = "sums"', "name = ", "TOML"),
        ("[store]", "[stores]", "store"),
        ('ref = "builtin:tiny"', 'ref = "builtin:tiny"\nrank = 4', "model.rank"),
        ('ref = "builtin:tiny"', 'ref = "./no-such-model"', "no-such-model"),
        ('name = "exact"', 'name = "exakt"', "exakt"),
        ('name = "exact"', 'name = "no_such_module:reward"', "no_such_module"),
        ("builtin:sort-digits", "problems.jsonl", "problems.jsonl"),
        ("builtin:sort-digits", "builtin:sort-letters", "sort-letters"),
        ('template = "{prompt}"', 'template = "{question}"', "template"),
        ('template = "{prompt}"', 'template = "{prompt}"\nheld_out = 20000', "held_out"),
        ('url = "store"', 'url = "ftp://somewhere"', "ftp"),
        ('url = "store"', 'url = "hf://me/adapters"', "hf://buckets/NAMESPACE/BUCKET"),
        ('url = "store"', 'url = "nats://somewhere"', "plain nats://"),
        ('url = "store"', 'url = "store"\n[lora]\nrank = 0', "lora.rank"),
        ("max_new_tokens = 5", "max_new_tokens = 5000", "max_new_tokens"),
        ('url = "store"', 'url = "store"\n[lora]\ntarget_modules = ["q_prj"]', "q_prj"),
    ],
)
def test_bad_run_files_are_one_line_before_anything_starts(
    fails: Fails, run_file: Callable[[str, str], str], old: str, new: str, says: str
):
    assert says in fails("create", run_file(old, new), "--broker", "nats://127.0.0.1:1")


def test_run_file_that_is_no_text_is_one_line(fails: Fails, tmp_path: Path):
    (tmp_path / "run.toml").write_bytes(b"name = \xff")
    assert "UTF-8" in fails("create", "run.toml", "--broker", "nats://127.0.0.1:1")


def test_unreachable_broker_is_one_line(fails: Fails, run_file: Callable[[], str]):
    assert "nats://127.0.0.1:1" in fails("create", run_file(), "--broker", "nats://127.0.0.1:1")
    assert "nats://127.0.0.1:1" in fails("status", "sums", "--broker", "nats://127.0.0.1:1")


def test_taken_port_is_one_line(fails: Fails):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "taken" in fails("broker", "--port", str(taken.getsockname()[1]))


def test_a_demo_over_an_earlier_one_is_one_line_and_leaves_it_alone(fails: Fails, tmp_path: Path):
    (tmp_path / "old" / "broker").mkdir(parents=True)
    assert "an earlier demo lies there; choose another --dir" in fails("demo", "--dir", "old")
    assert [path.name for path in (tmp_path / "old").rglob("*")] == ["broker"]
