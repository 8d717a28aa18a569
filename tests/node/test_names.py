"""Names: one live process each, and a default that is always a name."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from node.names import claim_home, default_name
from node.settings import NodeSettings, Places
from protocol.clock import NAME_PATTERN
from protocol.errors import OperatorError

CLAIM_AND_WAIT = """
import sys
from pathlib import Path
from node.names import claim_home
from node.settings import NodeSettings, Places
name = sys.argv[2] or None
settings = NodeSettings("sums", ("sampler",), "nats://b:1", name=name, places=Places(Path(sys.argv[1])))
print(claim_home(settings).name, flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process that holds a name until it is let go."""

    def __init__(self, home: Path, name: str = "") -> None:
        command = [sys.executable, "-c", CLAIM_AND_WAIT, str(home), name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.name = self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.communicate(timeout=10)


def some_settings(home: Path, name: str | None = None) -> NodeSettings:
    return NodeSettings("sums", ("sampler",), "nats://b:1", name=name, places=Places(home))


def test_two_processes_cannot_hold_one_name_and_the_next_one_can_when_the_first_has_ended(tmp_path: Path):
    holder = Holder(tmp_path, "alice")
    with pytest.raises(OperatorError, match="alice already runs here; choose another --name"):
        claim_home(some_settings(tmp_path, "alice"))
    holder.end()
    assert claim_home(some_settings(tmp_path, "alice")) == tmp_path / "nodes" / "sums" / "alice"


def test_the_next_free_default_name_is_taken_and_an_ended_process_frees_its_own(tmp_path: Path):
    base = default_name(platform.node(), "sampler")
    holder = Holder(tmp_path)
    assert holder.name == base
    assert claim_home(some_settings(tmp_path)).name == f"{base}-2"
    assert claim_home(some_settings(tmp_path)).name == f"{base}-3"
    holder.end()
    assert claim_home(some_settings(tmp_path)).name == base


def test_one_name_in_two_runs_is_two_nodes(tmp_path: Path):
    settings = some_settings(tmp_path, "bob")
    other = NodeSettings("other", ("sampler",), "nats://b:1", name="bob", places=Places(tmp_path))
    assert claim_home(settings) != claim_home(other)


def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match="cannot keep this node's state there") as refused:
        claim_home(some_settings(tmp_path / "file", "carol"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("ada", "ada-sampler"),
        ("Ada.example.org", "ada-sampler"),
        ("ADA_lovelace 2", "ada-lovelace-2-sampler"),
        ("-ada-", "ada-sampler"),
        ("münchen", "m-nchen-sampler"),
        ("東京", "node-sampler"),
        ("", "node-sampler"),
        (".local", "node-sampler"),
        ("a" * 31 + "-b", "a" * 31 + "-sampler"),
        ("a" * 200, "a" * 32 + "-sampler"),
    ],
)
def test_any_host_has_a_default_name_that_is_a_name(host: str, name: str):
    assert default_name(host, "sampler") == name
    assert NAME_PATTERN.fullmatch(f"{default_name(host, 'verifier')}-999")
