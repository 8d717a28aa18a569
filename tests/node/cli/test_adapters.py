"""``adapters list``: every run's exports, whatever else lies in the store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from node.cli.adapters_command import fetch_adapter, list_adapters
from node.stores import open_store
from protocol.errors import OperatorError
from protocol.manifest import MANIFEST_NAME, EntryKind, Manifest
from protocol.store_spec import StoreSpec
from tests.build import a_clock, an_identity


def export(root: Path, count: int) -> None:
    clock = a_clock(**{"learner-1": count})
    manifest = Manifest(
        path=f"sorting/exports/{clock.digest}",
        kind=EntryKind.EXPORT,
        run="sorting",
        author="learner-1",
        clock=clock,
        files=(),
    )
    store = open_store(StoreSpec(url=root.as_uri()), root.parent / "cache")
    asyncio.run(store.publish(manifest.signed(an_identity()), {}))


def test_an_export_is_fetched_into_a_directory_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root, to = tmp_path / "store", tmp_path / "adapter"
    root.mkdir()
    export(root, 3)
    list_adapters(str(root), as_json=True)
    (found,) = json.loads(capsys.readouterr().out)
    fetch_adapter(str(root), found["path"], to)
    assert [file.name for file in to.iterdir()] == [MANIFEST_NAME]
    with pytest.raises(OperatorError, match="choose another directory"):
        fetch_adapter(str(root), found["path"], to)
    with pytest.raises(OperatorError, match="adapters list"):
        fetch_adapter(str(root), "sorting/exports/none", tmp_path / "other")


def test_exports_are_listed_by_age_and_what_is_none_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root, broken = tmp_path / "store", f"sorting/exports/{'0' * 16}"
    root.mkdir()
    for count in (12, 3):
        export(root, count)
    for name in ("sorting/exports/best", "notes", broken):
        (root / name).mkdir()
        (root / name / MANIFEST_NAME).write_text("mine")
    list_adapters(str(root), as_json=True)
    out, err = capsys.readouterr()
    assert [found["clock"] for found in json.loads(out)] == ["learner-1:3", "learner-1:12"]
    assert err.startswith(f"left out: {broken}: not a manifest")
    assert len(err.splitlines()) == 1
