"""The templates in ``deploy/hf_jobs``, and what its README tells people to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from node.job_templates import KINDS, TEMPLATES, read_templates
from tests.command import Command
from tests.jobs.standin import StandIn

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "hf_jobs"


def test_templates_for_people_are_the_built_in_ones():
    assert [kind for kind in KINDS if not (FOLDER / f"{kind}.toml").is_file()] == []
    assert read_templates(FOLDER) == TEMPLATES


def test_folder_of_templates_is_one_that_up_takes(hub: StandIn, up: Command):
    assert up().code == 0
    first = list(hub.bodies)
    assert up("--templates", str(FOLDER), "--install", "none", "--dry-run").err == ""
    assert up("--templates", str(FOLDER)).code == 0
    assert hub.bodies == first


@pytest.mark.parametrize(
    "line",
    re.findall(r"^grpo-node (jobs .*?)(?: {2,}#.*)?$", (FOLDER / "README.md").read_text(), re.MULTILINE),
)
def test_commands_of_the_readme_are_commands(hub: StandIn, jobs: Command, run_file: Path, line: str):
    hub_names = line.replace("$INSTALL", "none").replace("NAME", "sums").replace("a10g-large", "a10g-small")
    said = jobs(*shlex.split(hub_names)[1:])
    assert "--help" not in said.err, said.err
    assert "Traceback" not in said.err
