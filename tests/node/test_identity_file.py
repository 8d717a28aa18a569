"""A node's secret on disk: made once, readable by its owner only, never silently replaced."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.identity_file import load_or_create_identity
from protocol.errors import OperatorError
from protocol.identity import Identity


def test_an_identity_is_made_once_and_found_again(tmp_path: Path):
    file = tmp_path / "keys" / "node.nk"
    made = load_or_create_identity(file, "sampler-1")
    found = load_or_create_identity(file, "sampler-1")
    assert found.public_key == made.public_key
    assert made.public_key.startswith("U")
    assert [path.name for path in file.parent.iterdir()] == ["node.nk"]


def test_only_the_owner_can_read_it(tmp_path: Path):
    file = tmp_path / "node.nk"
    load_or_create_identity(file, "sampler-1")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_others_can_read_is_closed_with_a_warning(tmp_path: Path):
    file = tmp_path / "node.nk"
    made = load_or_create_identity(file, "sampler-1")
    file.chmod(0o644)
    with capture_logs() as logs:
        assert load_or_create_identity(file, "sampler-1").public_key == made.public_key
    assert file.stat().st_mode & 0o777 == 0o600
    assert [(entry["event"], entry["mode"]) for entry in logs] == [("identity_file_closed", "0644")]


def test_a_seed_made_by_other_tools_is_read(tmp_path: Path):
    file = tmp_path / "node.nk"
    file.write_bytes(Identity.deterministic("sampler-1").seed)
    file.chmod(0o600)
    identity = load_or_create_identity(file, "sampler-1")
    assert identity.public_key == Identity.deterministic("sampler-1").public_key


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hello", b"\xff\x00" * 29, b"SU" + b"A" * 56, b"SA" + b"A" * 56, b"S" * 100_000]
)
def test_garbage_is_refused_and_kept(tmp_path: Path, content: bytes):
    file = tmp_path / "node.nk"
    file.write_bytes(content)
    with pytest.raises(OperatorError, match=r"node\.nk holds no user nkey seed") as refused:
        load_or_create_identity(file, "sampler-1")
    assert "\n" not in str(refused.value)
    assert file.read_bytes() == content


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "node.nk").mkdir()
    with pytest.raises(OperatorError, match=r"node\.nk cannot be used: Is a directory"):
        load_or_create_identity(tmp_path / "node.nk", "sampler-1")
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match="File exists"):
        load_or_create_identity(tmp_path / "file" / "node.nk", "sampler-1")


def test_nodes_that_start_at_once_share_one_identity(tmp_path: Path):
    file, start, keys = tmp_path / "node.nk", threading.Barrier(8), []

    def run() -> None:
        start.wait()
        keys.append(load_or_create_identity(file, "sampler-1").public_key)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1
