"""A node whose broker does not have its run: told at once, or with ``--wait`` once it is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.sites import Site


@pytest.fixture
def command(site: Site, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    arguments = ["--role", "verifier", "--run", "nothing", "--broker", site.broker.url, "--threads", "1"]
    environ = os.environ | {"GRPO_TOKEN": site.broker.token, "GRPO_HOME": str(tmp_path / "home")}
    return [sys.executable, "-m", "node", *arguments], environ


def test_without_a_run_a_node_ends_with_one_line(command: tuple[list[str], dict[str, str]]):
    line, environ = command
    ended = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("grpo-node: no run 'nothing' at this broker; create it")


def test_a_node_that_waits_for_its_run_can_be_stopped(command: tuple[list[str], dict[str, str]]):
    line, environ = command
    node = subprocess.Popen(
        [*line, "--wait"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert node.stdout is not None
    try:
        for said in node.stdout:
            if "waiting_for_run" in said:
                node.send_signal(signal.SIGTERM)
        assert node.wait() == 0
    finally:
        node.kill()
        node.wait()
        node.stdout.close()
