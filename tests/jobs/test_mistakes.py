"""What a person can get wrong with ``grpo-node jobs``: one line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Command
from tests.jobs.conftest import RUN_FILE
from tests.jobs.standin import Fault, StandIn


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "nothing.toml"], "nothing.toml: cannot read the run file"),
        (["up", "run.toml"], "how does grpo-node get onto the broker's job? --install"),
        (["up", "run.toml", "--install", "none", "--flavor", "h100"], "no flavor 'h100' for learner-1"),
        (["up", "run.toml", "--flavor", "trainer=h200"], "there are broker, learner, sampler, verifier"),
        (["up", "run.toml", "--samplers", "200"], "samplers: Input should be less than or equal to 100"),
        (["up", "run.toml", "--samplers", "-1"], "--samplers"),
        (["up", "run.toml", "--timeout", "0"], "timeout_h: Input should be greater than 0"),
        (["up", "run.toml", "--mount", "alice/grpo:/grpo"], "mount 'alice/grpo:/grpo'"),
        (["up", "run.toml", "--mount", "hf://buckets/alice/grpo"], "mount 'hf://buckets/alice/grpo'"),
        (["up", "run.toml", "--templates", "nowhere"], "none of broker.toml, learner.toml"),
        (["up", "run.toml", "--install", "none", "--namespace", "bob"], "may not do that"),
        (["up", "run.toml", "--install", "none", "--namespace", "nobody"], "no such namespace"),
        (["up", "run.toml", "--install", "none", "--namespace", "a/b"], "--namespace 'a/b' is no name"),
        (["scale", "sums"], "scale wants --learners, --samplers or --verifiers"),
        (["scale", "sums", "--samplers", "2"], "use: grpo-node jobs up RUNFILE"),
        (["logs", "sums", "learner-1"], "run sums has no job learner-1 in alice; there are: none"),
        (["logs", "sums", "--follow"], "--follow follows one job"),
        (["broker", "run.toml"], "GRPO_BROKER_KEYS is not set"),
        (["invite", "sums", "--role", "trainer"], "roles are learner, sampler, verifier"),
        (["invite", "sums", "--role", "sampler"], "use: grpo-node jobs up RUNFILE"),
        (["invite", "sums", "--role", "sampler", "--number", "21"], "--number"),
        (["start"], "start"),
    ],
)
def test_bad_arguments_are_one_line(
    hub: StandIn, jobs: Command, run_file: Path, arguments: list[str], says: str
):
    said = jobs(*arguments)
    assert said.code == 2
    assert says in said.line
    assert hub.jobs == {}


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("", "learner.toml: command: Field required"),
        ('command = "x"\ncomand = "y"', "learner.toml: comand: no such setting"),
        ('command = "grpo-node --run {name}"', "learner.toml: command: no such placeholder: {name}"),
        ('command = "x"\nexpose = [99999]', "learner.toml: expose.0"),
        ('command = "x"\n[env]\nWANDB_API_KEY = "w"', "write secrets = ['WANDB_API_KEY']"),
        ('command = "x"\nsecrets = ["GRPO_TEST_NOT_SET"]', "the secret GRPO_TEST_NOT_SET, which is not set"),
        ("command = ", "learner.toml: not TOML"),
    ],
)
def test_faults_of_a_template_are_one_line(up: Command, here: Path, hub: StandIn, template: str, says: str):
    (here / "mine").mkdir()
    (here / "mine" / "learner.toml").write_text(template)
    said = up("--templates", "mine")
    assert said.code == 2
    assert says in said.line
    assert hub.jobs == {}


def test_store_on_the_disk_of_a_brokers_job_is_refused(jobs: Command, here: Path, hub: StandIn):
    (here / "nats.toml").write_text(RUN_FILE.replace("hf://buckets/alice/grpo", "nats://"))
    said = jobs("up", "nats.toml", "--install", "none")
    assert said.code == 2
    assert "ends with it; use hf://buckets/alice/NAME" in said.line
    assert hub.jobs == {}


@pytest.mark.parametrize("url", ["store", "file:///mnt/store"])
def test_store_that_jobs_do_not_share_is_refused(jobs: Command, here: Path, hub: StandIn, url: str):
    (here / "files.toml").write_text(RUN_FILE.replace("hf://buckets/alice/grpo", url))
    said = jobs("up", "files.toml", "--install", "none", "--mount", "hf://buckets/alice/x:/mnt/other")
    assert said.code == 2
    assert "jobs share no disk; use hf://buckets/alice/NAME" in said.line


def test_secret_that_a_template_names_goes_along(
    up: Command, here: Path, hub: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "w4nd8")
    (here / "mine").mkdir()
    (here / "mine" / "learner.toml").write_text('command = "x"\nsecrets = ["WANDB_API_KEY"]\n[env]\nA = "1"')
    assert up("--templates", "mine").code == 0
    learner = next(body for body in hub.bodies if body["labels"]["grpo-slot"] == "learner-1")
    assert learner["secrets"]["WANDB_API_KEY"] == "w4nd8"
    assert learner["environment"] == {"A": "1"}


def test_token_that_the_hub_refuses_is_named(jobs: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    said = jobs("status", "sums")
    assert said.code == 2
    assert "the token is not valid or has expired; run: hf auth login (401)" in said.line
    assert "hf_expired" not in said.err


def test_account_without_the_right_is_told_which_right(hub: StandIn, up: Command):
    hub.faults.append(Fault("POST /api/jobs/alice$", status=403, count=9, says="Jobs need a paid plan"))
    said = up()
    assert said.code == 2
    assert said.line.endswith("(403): Jobs need a paid plan")


def test_who_is_not_logged_in_is_told_how(hub: StandIn, tmp_path: Path):
    environ = {k: v for k, v in os.environ.items() if k != "HF_TOKEN"}
    environ |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "GRPO_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "node", "jobs", "status", "sums"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "grpo-node: not logged in to the Hub; run: hf auth login\n"
