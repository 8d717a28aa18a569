"""``adapters list``: every run's exports, whatever else lies in the store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from node.cli.adapters_command import list_adapters
from node.stores import open_store
from protocol.manifest import MANIFEST_NAME, EntryKind, Manifest
from protocol.runspec import StoreSpec
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
