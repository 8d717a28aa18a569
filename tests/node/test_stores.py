"""Store URLs: what is understood, and what a person is told about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.stores import BrokerPlace, HubPlace, Place, create_bucket, open_store, store_place
from protocol.errors import OperatorError
from protocol.store_spec import StoreSpec
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


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("hf://buckets/me/adapters", HubPlace("me/adapters", "")),
        ("hf://buckets/me/adapters/", HubPlace("me/adapters", "")),
        ("hf://buckets/my-org/a.b_c/runs/2026", HubPlace("my-org/a.b_c", "runs/2026")),
        ("nats://", BrokerPlace()),
    ],
)
def test_a_url_names_a_bucket_or_the_broker(url: str, place: Place):
    assert store_place(StoreSpec(url=url)) == place


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("hf://me/adapters", "does not name a bucket"),
        ("hf://buckets/adapters", "does not name a bucket"),
        ("hf://buckets/me/adapters/../other", "does not name a bucket"),
        ("hf://buckets/me/adapters/a b", "does not name a bucket"),
        ("hf://buckets/me/adapters//x", "does not name a bucket"),
        ("hf://buckets/me/adapters?x", "does not name a bucket"),
        ("nats://somewhere:4222", "plain nats://"),
    ],
)
def test_a_url_of_a_known_kind_that_names_nothing_is_one_line(url: str, says: str):
    with pytest.raises(OperatorError, match=says) as refused:
        store_place(StoreSpec(url=url))
    assert "\n" not in str(refused.value)


def test_a_store_in_a_broker_needs_a_connection_to_it(tmp_path: Path):
    with pytest.raises(OperatorError, match="--broker"):
        open_store(StoreSpec(url="nats://"), tmp_path)


async def test_only_a_bucket_is_made_on_request(tmp_path: Path):
    with pytest.raises(OperatorError, match="no bucket on the Hub"):
        await create_bucket(StoreSpec(url=tmp_path.as_uri()))


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
