"""Joining a run executes nothing from it: a hostile owner against a friend's node."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.invitation import Invitation
from node.models import load_tokenizer, resolve_model
from node.settings import NodeSettings, Places, Role, read_environment
from node.tiny_model import tiny_model
from node.wiring import build_node
from protocol.codec import encode
from protocol.errors import OperatorError
from protocol.messages import RunState
from protocol.runspec import ModelSpec, RunSpec, TasksSpec
from protocol.subjects import SPEC_KEY, Bucket
from roles.base_model import load_base
from roles.tasks.prompts import PromptBuilder
from tests.build import an_identity
from tests.isolation.ground import Guarded

EVIL_MODULE = """
from pathlib import Path
Path({marker!r}).write_text("executed")
def reward(completion, answer): return 1.0
class Evil: pass
"""


class Friend:
    """A machine with a home, files of its own, and a module that must not run."""

    def __init__(self, guarded: Guarded, directory: Path) -> None:
        self.guarded = guarded
        self.directory = directory
        self.marker = directory / "executed"
        self.home = directory / "home"
        self.home.mkdir()
        (directory / "evil_rewards.py").write_text(EVIL_MODULE.format(marker=str(self.marker)))
        (directory / "diary.jsonl").write_text('{"prompt": "dear diary", "answer": "secret"}\n' * 3)
        (directory / "photos").mkdir()

    async def join(self, spec: RunSpec, *roles: Role, **changes: Any) -> None:
        """Join ``spec`` by an invitation; must raise."""
        state = RunState(spec_json=spec.model_dump_json(), spec_digest=spec.digest, creator="owner")
        await self.guarded.owner.put(Bucket.RUN, SPEC_KEY, encode(state, an_identity("owner")))
        invitation: Invitation = await self.guarded.invited(*roles, node="friend")
        settings = NodeSettings(
            spec.name,
            roles,
            invitation.url,
            name="friend",
            device="cpu",
            threads=1,
            places=Places(self.home),
            invitation=invitation,
        )
        node = await build_node(replace(settings, **changes))
        for part in node._parts:
            await part.close()
        await node._ring.bus.close()

    def files(self) -> set[str]:
        """Everything on the machine but the node's own directory and its model."""
        return {
            str(path)
            for path in self.directory.rglob("*")
            if path.is_file() and not path.is_relative_to(self.home)
        }


@pytest.fixture
def friend(guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Friend:
    directory = tmp_path / "friend"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    return Friend(guarded, directory)


@pytest.mark.parametrize(
    ("group", "changes", "role", "says"),
    [
        ("rewards", [{"name": "evil_rewards:reward"}], "verifier", "--allow-module evil_rewards"),
        ("rewards", [{"name": "os:system"}], "verifier", "--allow-module os"),
        ("tasks", {"source": "diary.jsonl"}, "verifier", "--allow-path"),
        ("tasks", {"source": "/etc/passwd.jsonl"}, "learner", "--allow-path"),
        ("tasks", {"source": "hf:photos"}, "verifier", "--allow-path"),
        ("tasks", {"source": "hf:../friend"}, "verifier", "--allow-path"),
        ("model", {"ref": "~/.ssh"}, "sampler", "--allow-path"),
        ("model", {"ref": "photos"}, "sampler", "--allow-path"),
        ("store", {"url": "file:///"}, "sampler", "--allow-path"),
        ("store", {"url": "file:///home/../etc"}, "sampler", "--allow-path"),
        ("store", {"url": "photos"}, "sampler", "--allow-path"),
    ],
)
async def test_what_the_owner_wants_of_the_machine_is_refused_before_it_is_touched(
    friend: Friend, group: str, changes: Any, role: Role, says: str
):
    spec = friend.guarded.spec.model_dump() | {"store": {"url": "hf://buckets/a/b"}}
    spec[group] = changes if group == "rewards" else spec[group] | changes
    before = friend.files()
    with pytest.raises(OperatorError, match=says) as caught:
        await friend.join(RunSpec.model_validate(spec), role)
    assert "\n" not in str(caught.value)
    assert "evil_rewards" not in sys.modules
    assert not friend.marker.exists()
    assert friend.files() == before


@pytest.mark.parametrize("argument", ["~/.ssh", "../friend", "photos", "diary.jsonl"])
async def test_an_environments_arguments_name_no_file_that_nobody_allowed(friend: Friend, argument: str):
    fields = friend.guarded.spec.model_dump() | {"store": {"url": "hf://buckets/a/b"}}
    fields["tasks"] |= {"source": "verifiers:sums", "arguments": {"deep": [{"er": argument}]}}
    with pytest.raises(OperatorError, match=r"tasks\.arguments .* --allow-path"):
        await friend.join(RunSpec.model_validate(fields), "learner", allow_modules=("sums",))


async def test_a_link_out_of_an_allowed_directory_is_not_allowed(friend: Friend):
    (friend.directory / "shared").mkdir()
    (friend.directory / "shared" / "link").symlink_to(friend.directory / "photos")
    fields = friend.guarded.spec.model_dump()
    fields["store"] = {"url": (friend.directory / "shared" / "link").as_uri()}
    spec = RunSpec.model_validate(fields)
    with pytest.raises(OperatorError, match="--allow-path"):
        await friend.join(spec, "sampler", allowed_paths=(friend.directory / "shared",))


async def test_what_the_friend_allows_is_used(friend: Friend):
    models = read_environment().places.models
    models.mkdir(parents=True, exist_ok=True)
    (friend.home / "models").symlink_to(models)
    fields = friend.guarded.spec.model_dump()
    fields["rewards"] = [{"name": "evil_rewards:reward"}]
    fields["store"] = {"url": (friend.directory / "photos").as_uri()}
    await friend.join(
        RunSpec.model_validate(fields),
        "verifier",
        allow_modules=("evil_rewards",),
        allowed_paths=(friend.directory / "photos",),
    )
    assert friend.marker.exists()  # in a worker process: the friend said so


# --- models and tokenizers -----------------------------------------------------------------------


@pytest.fixture
def a_model(tmp_path: Path) -> Path:
    """A copy of the tiny model, to be spoiled."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_model(read_environment().places.models, 0), copy)
    return copy


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_code_that_lies_beside_a_model_is_not_run(a_model: Path, tmp_path: Path):
    marker = tmp_path / "executed"
    (a_model / "evil.py").write_text(EVIL_MODULE.format(marker=str(marker)))
    edit(
        a_model / "config.json",
        lambda c: c.update(
            model_type="evil", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
        ),
    )
    edit(
        a_model / "tokenizer_config.json",
        lambda c: c.update(tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    )
    with pytest.raises(OperatorError):
        load_base(a_model, torch.device("cpu"), dtype="float32")
    with pytest.raises(OperatorError):
        load_tokenizer(a_model)
    assert not marker.exists()


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "executed")


def test_pickled_weights_are_never_opened(a_model: Path, tmp_path: Path):
    marker = tmp_path / "executed"
    for file in a_model.glob("*.safetensors"):
        file.unlink()
    for name in ("pytorch_model.bin", "model.pt", "tokenizer.pkl"):
        (a_model / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(OperatorError, match="safetensors"):
        resolve_model(ModelSpec(ref=str(a_model)), tmp_path / "cache")
    with pytest.raises(OperatorError):
        load_base(a_model, torch.device("cpu"), dtype="float32")
    assert not marker.exists()


def test_a_chat_template_reaches_nothing_of_python(a_model: Path):
    tokenizer = load_tokenizer(a_model)
    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
    ):
        tokenizer.chat_template = attack
        with pytest.raises(OperatorError, match="chat template refuses"):
            PromptBuilder(tokenizer, TasksSpec(source="builtin:sort-digits"))


@pytest.mark.parametrize(
    "template",
    [
        "{prompt:>99999999999}",
        "{prompt.__class__}",
        "{prompt!r:9}",
        "{0}",
        "{prompt:{prompt}}",
        "no field",
        "{",
    ],
)
def test_a_template_is_text_around_the_prompt(a_model: Path, template: str):
    spec = TasksSpec(source="builtin:sort-digits", template=template)
    with pytest.raises(OperatorError, match=r"tasks\.template"):
        PromptBuilder(load_tokenizer(a_model), spec)
