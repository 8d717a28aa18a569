"""Store URLs: what is understood, and what a person is told about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.stores import open_store
from protocol.errors import OperatorError
from protocol.runspec import StoreSpec
from tests.build import an_entry


async def test_a_file_url_opens_the_directory_it_names(tmp_path: Path):
    root = tmp_path / "a store"
    root.mkdir()
    for url in (root.as_uri(), f"file://localhost{tmp_path}/a%20store"):
        assert await open_store(StoreSpec(url=url), tmp_path / "cache").list("") == []
    await open_store(StoreSpec(url=root.as_uri()), tmp_path / "cache").publish(*an_entry())
    assert (root / "test").is_dir()


def test_opening_a_store_touches_nothing(tmp_path: Path):
    open_store(StoreSpec(url=(tmp_path / "none").as_uri()), tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["hf://buckets/me/adapters", "nats://"])
def test_a_planned_store_is_named_as_not_supported_yet(tmp_path: Path, url: str):
    with pytest.raises(OperatorError, match=r"not supported by this version; use file:///"):
        open_store(StoreSpec(url=url), tmp_path)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "store",
        "/srv/store",
        "./store",
        "s3://bucket/x",
        "file://store/x",
        "file:store",
        "file://",
        "file:///a?b",
        "file:///a#b",
    ],
)
def test_any_other_url_is_refused_with_the_supported_form(tmp_path: Path, url: str):
    with pytest.raises(OperatorError, match="file:///absolute/path") as refused:
        open_store(StoreSpec(url=url), tmp_path)
    assert "\n" not in str(refused.value)
