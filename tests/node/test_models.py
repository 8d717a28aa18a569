"""The base model: where it comes from, what proves that two copies are the same, and each mistake's line."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from node.models import Detokenizer, LocalModel, load_tokenizer, pin, resolve_model, stop_token_ids
from node.tiny_model import EOS, tiny_model
from protocol.errors import OperatorError
from protocol.runspec import ModelSpec


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    """A model folder that knows nothing."""
    directory: Path = tmp_path_factory.mktemp("models")
    return tiny_model(directory, 0, steps=1)


@pytest.fixture
def folder(untrained, tmp_path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(untrained, tmp_path / "mine")
    directory: Path = tmp_path / "mine"
    return directory


def resolved(directory: Path) -> LocalModel:
    return resolve_model(ModelSpec(ref=str(directory)), directory)


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_local_folder_is_found_from_the_base_directory(folder):
    model = resolve_model(ModelSpec(ref="./mine"), folder, base_dir=folder.parent)
    assert model.directory.samefile(folder)
    assert (model.vocab_size, model.context_tokens) == (42, 64)
    assert resolve_model(ModelSpec(ref="mine"), folder, base_dir=folder.parent) == model


@pytest.mark.parametrize(("ref", "seed"), [("builtin:tiny", 0), ("builtin:tiny-7", 7)])
def test_the_built_in_model_is_named_by_its_seed(ref, seed, tmp_path, monkeypatch, untrained):
    made = []

    def make(cache_dir, seed):
        made.append(seed)
        return untrained

    monkeypatch.setattr("node.tiny_model.tiny_model", make)
    resolve_model(ModelSpec(ref=ref), tmp_path)
    assert made == [seed]


def test_the_built_in_model_is_made_in_the_cache(tmp_path, monkeypatch, untrained):
    monkeypatch.setattr(
        "node.tiny_model.tiny_model", lambda cache_dir, seed: tiny_model(cache_dir, seed, steps=1)
    )
    model = resolve_model(ModelSpec(ref="builtin:tiny"), tmp_path)
    assert model.directory.parent == tmp_path
    assert model.revision == resolved(untrained).revision


def test_who_wrote_the_config_does_not_change_its_digest(folder):
    before = resolved(folder).config_digest
    change(folder / "config.json", transformers_version="99", _name_or_path="elsewhere")
    assert resolved(folder).config_digest == before


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("config.json", "config_digest"),
        ("generation_config.json", "config_digest"),
        ("tokenizer.json", "tokenizer_digest"),
        ("tokenizer_config.json", "tokenizer_digest"),
        ("chat_template.jinja", "tokenizer_digest"),
        ("model.safetensors", "revision"),
    ],
)
def test_a_copy_that_differs_from_the_pinned_one_is_refused_with_both_digests(folder, file, field):
    pinned = pin(ModelSpec(ref=str(folder)), folder)
    assert resolve_model(pinned, folder) == resolved(folder)
    path = folder / file
    if path.suffix == ".json":
        change(path, more=1)
    else:
        path.write_bytes(path.read_bytes() + b" ")
    here = getattr(resolved(folder), field)
    with pytest.raises(OperatorError, match=rf"{field} is {here} here, {getattr(pinned, field)} in the run"):
        resolve_model(pinned, folder)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(OperatorError, match=r"no config\.json and \*\.safetensors in"):
        resolved(tmp_path)
    with pytest.raises(OperatorError, match=r"no config\.json and \*\.safetensors in"):
        resolved(tmp_path / "none")


def test_a_config_that_is_not_json_is_refused(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(OperatorError, match=r"config\.json is not JSON"):
        resolved(folder)


def test_sizes_are_found_in_the_text_part_of_a_model_that_sees(folder):
    sizes = {"vocab_size": 7, "max_position_embeddings": 9}
    (folder / "config.json").write_text(json.dumps({"text_config": sizes}))
    model = resolved(folder)
    assert (model.vocab_size, model.context_tokens) == (7, 9)


def test_a_model_without_a_context_length_is_refused(folder):
    (folder / "config.json").write_text('{"vocab_size": 7}')
    with pytest.raises(OperatorError, match="has no max_position_embeddings"):
        resolved(folder)


def test_every_eos_of_the_model_ends_a_completion(folder):
    """Case A11: a list in the generation config, another id in the tokenizer."""
    change(folder / "generation_config.json", eos_token_id=[7, 8])
    assert stop_token_ids(folder, load_tokenizer(folder)) == (EOS, 7, 8)


def test_a_model_without_eos_is_refused(folder):
    for name in ("config.json", "generation_config.json"):
        change(folder / name, eos_token_id=None)
    change(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(OperatorError, match="names no EOS token"):
        stop_token_ids(folder, load_tokenizer(folder))


def test_a_folder_without_a_tokenizer_is_refused(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(OperatorError, match="no tokenizer can be read"):
        load_tokenizer(folder)


def test_the_text_of_a_completion_is_what_was_sampled_less_special_tokens(folder):
    assert Detokenizer(load_tokenizer(folder)).decode([4, 5, EOS]) == "12"


@pytest.mark.parametrize(
    "ref", ["tiny", "builtin:tinny", "builtin:tiny-x", "a/b/c", "https://example.org/a/b"]
)
def test_what_is_no_model_is_answered_with_the_forms_there_are(ref, tmp_path):
    with pytest.raises(OperatorError, match=re.escape(f"{ref!r} is no model; write builtin:tiny")):
        resolve_model(ModelSpec(ref=ref), tmp_path)


@contextmanager
def a_hub(status: int, code: str) -> Iterator[str]:
    """A real HTTP server that answers every question with one of the Hub's refusals."""

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815  # the standard library's name

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "RepoNotFound", "the Hub has no model no-one/nothing; check the spelling"),
        (404, "RepoNotFound", "the Hub has no model no-one/nothing"),
        (403, "GatedRepo", "is gated: accept its terms"),
        (404, "RevisionNotFound", "has no revision v9"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_that_says_what_to_do(tmp_path, status, code, message):
    with a_hub(status, code) as endpoint, pytest.raises(OperatorError) as refused:
        resolve_model(ModelSpec(ref="no-one/nothing", revision="v9"), tmp_path, endpoint=endpoint)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_a_network_a_model_that_is_not_cached_is_out_of_reach(tmp_path):
    with a_hub(200, "") as endpoint:
        pass  # its port is closed now
    with pytest.raises(OperatorError, match="is not on this machine and the Hub cannot be reached"):
        resolve_model(ModelSpec(ref="no-one/nothing"), tmp_path, endpoint=endpoint)
