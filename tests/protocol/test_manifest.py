"""Manifests: every field is under the signature, and no path leaves the store."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.errors import StoreCorrupt
from protocol.manifest import MANIFEST_NAME, EntryKind, FileInfo, Manifest
from tests.build import RUN, a_clock, an_identity

PATH = f"{RUN}/updates/learner-1/3-0123456789abcdef"
ME = an_identity()
HASH = "0" * 64


def a_manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "path": PATH,
        "kind": EntryKind.UPDATE,
        "run": RUN,
        "author": "learner-1",
        "clock": a_clock(**{"learner-1": 3}),
        "count": 3,
        "weight": 1.5,
        "version": 4.5,
        "step_norm": 0.25,
        "policy_digest": HASH,
        "groups": ("learner-1.0", "learner-1.1"),
        "dropped": {"learner-1.2": "stale"},
        "extra": {"engine": "é"},
        "files": Manifest.describe({"update.safetensors": b"abc", "a.json": b""}),
    }
    return Manifest(**(fields | changes))


def test_a_signed_manifest_comes_back_as_it_was():
    signed = a_manifest().signed(ME)
    assert Manifest.from_json(signed.to_json(), PATH) == signed
    assert signed.signer == ME.public_key


TAMPERED: dict[str, Any] = {
    "path": PATH + "0",
    "kind": "export",
    "run": "other",
    "author": "learner-2",
    "clock": {"learner-1": 4},
    "count": 4,
    "weight": 1.25,
    "version": 4.25,
    "step_norm": 0.125,
    "policy_digest": "1" * 64,
    "groups": ["learner-1.0"],
    "dropped": {},
    "extra": {"engine": "è"},
    "files": [{"name": "update.safetensors", "size": 4, "sha256": HASH}],
    "signer": an_identity("stranger").public_key,
    "signature": "A" * 86 + "==",
}


@pytest.mark.parametrize("field", Manifest.model_fields)
def test_a_change_in_any_field_is_noticed(field: str):
    body = json.loads(a_manifest().signed(ME).to_json())
    assert body[field] != TAMPERED[field]
    body[field] = TAMPERED[field]
    with pytest.raises(StoreCorrupt, match="signature"):
        Manifest.from_json(json.dumps(body).encode(), body["path"])


@pytest.mark.parametrize("part", ["name", "size", "sha256"])
def test_a_change_in_the_description_of_a_file_is_noticed(part: str):
    body = json.loads(a_manifest().signed(ME).to_json())
    body["files"][0][part] = {"name": "b.json", "size": 1, "sha256": HASH}[part]
    with pytest.raises(StoreCorrupt, match="signature does not match"):
        Manifest.from_json(json.dumps(body).encode(), PATH)


@pytest.mark.parametrize("field", Manifest.model_fields)
def test_a_missing_field_is_noticed_or_has_its_default(field: str):
    body = json.loads(a_manifest().signed(ME).to_json())
    del body[field]
    with pytest.raises(StoreCorrupt):
        Manifest.from_json(json.dumps(body).encode(), PATH)


def test_a_manifest_that_lies_under_another_path_is_refused():
    with pytest.raises(StoreCorrupt, match="the manifest is of"):
        Manifest.from_json(a_manifest().signed(ME).to_json(), PATH + "0")


def test_an_unsigned_manifest_is_refused():
    with pytest.raises(StoreCorrupt, match="signature"):
        Manifest.from_json(a_manifest().to_json(), PATH)


def test_somebody_elses_signature_names_somebody_else():
    stranger = an_identity("stranger")
    manifest = Manifest.from_json(a_manifest().signed(ME).signed(stranger).to_json(), PATH)
    assert manifest.signer == stranger.public_key


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=50).map(lambda text: json.dumps({text: [text]}).encode()))
def test_anything_else_is_a_corrupt_entry_and_nothing_worse(data: bytes):
    with pytest.raises(StoreCorrupt):
        Manifest.from_json(data, PATH)


@pytest.mark.parametrize("cut", range(0, 900, 60))
def test_a_cut_manifest_is_refused(cut: int):
    data = a_manifest().signed(ME).to_json()
    with pytest.raises(StoreCorrupt):
        Manifest.from_json(data[:cut], PATH)


def test_a_manifest_of_deep_or_numeric_nonsense_is_refused():
    body = json.loads(a_manifest().signed(ME).to_json())
    for wrong in (
        {"weight": float("nan")},
        {"weight": 1e999},
        {"count": 10**400},
        {"count": "3"},
        {"more": 1},
    ):
        with pytest.raises(StoreCorrupt, match="not a manifest"):
            Manifest.from_json(json.dumps(body | wrong).encode(), PATH)
    with pytest.raises(StoreCorrupt, match="not a manifest"):
        Manifest.from_json(b"[" * 100_000, PATH)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/x",
        "..",
        "../x",
        "a/..",
        "a/../b",
        "a/./b",
        ".",
        "a//b",
        "a/",
        ".a",
        "a/.b",
        "a\\b",
        "C:/a",
        "a b",
        "ä",
        "a\n",
    ],
)
def test_a_path_stays_below_the_store(path: str):
    with pytest.raises(ValidationError, match="path"):
        a_manifest(path=path)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "/a", "a\\b", "a b", "a\n", "a" * 101])
def test_a_file_lies_directly_in_its_entry(name: str):
    with pytest.raises(ValidationError, match="name"):
        FileInfo(name=name, size=0, sha256=HASH)


@pytest.mark.parametrize("names", [("a", "a"), (MANIFEST_NAME,)], ids=["twice", "the manifest"])
def test_no_file_is_listed_twice_or_replaces_the_manifest(names: tuple[str, ...]):
    with pytest.raises(ValidationError, match="listed once"):
        a_manifest(files=tuple(FileInfo(name=name, size=0, sha256=HASH) for name in names))


@pytest.mark.parametrize("group", ["", "a..b", "a.", "A", "a b", "a.*", "a/b"])
def test_a_manifest_names_groups_that_can_be_keys(group: str):
    with pytest.raises(ValidationError, match="groups"):
        a_manifest(groups=(group,))
    with pytest.raises(ValidationError, match="dropped"):
        a_manifest(dropped={group: "stale"})


def test_what_is_signed_does_not_depend_on_order_or_on_the_signature():
    one = a_manifest(dropped={"a.0": "stale", "b.0": "ahead"})
    two = a_manifest(dropped={"b.0": "ahead", "a.0": "stale"})
    assert one.canonical() == two.canonical() == one.model_copy(update={"signature": "x"}).canonical()
    assert one.signed(ME).signature == two.signed(ME).signature


def test_the_canonical_form_is_frozen():
    manifest = Manifest(path="a/genesis", kind=EntryKind.GENESIS, run="a", author="b", files=(), weight=4e-5)
    assert manifest.canonical() == (
        b'{"author":"b","clock":{},"count":0,"dropped":{},"extra":{},"files":[],"groups":[],"kind":"genesis",'
        b'"path":"a/genesis","policy_digest":"","run":"a","signer":"","step_norm":0.0,"version":0.0,"weight":4e-05}'
    )


def test_files_are_described_by_size_and_hash_in_order_of_their_names():
    first, second = Manifest.describe({"b": b"abc", "a": b""})
    assert (first.name, first.size, first.sha256[:8]) == ("a", 0, "e3b0c442")
    assert (second.name, second.size, second.sha256[:8]) == ("b", 3, "ba7816bf")
