"""``jobs up``, ``scale`` and ``down``: what is asked of the Hub, through the real client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from node.invitation import Invitation
from protocol.identity import Identity
from tests.command import Command
from tests.jobs.conftest import RUN_FILE
from tests.jobs.standin import FLAVORS, TOKEN, StandIn

GOLDEN = Path(__file__).parent / "golden"
TWO_SAMPLERS = ("--learners", "1", "--samplers", "2", "--verifiers", "1")
ALL = ["broker", "learner-1", "sampler-1", "sampler-2", "verifier-1"]
Body = dict[str, Any]

INSTALL = "/grpo/grpo_node-0.1.0-py3-none-any.whl[ws]"


def without_what_changes(body: Body) -> Body:
    """A request with its secrets, the mark of its keys and the digest of its settings struck out."""
    return body | {
        "secrets": dict.fromkeys(body["secrets"], "***"),
        "labels": body["labels"] | {"grpo-key": "***", "grpo-spec": "SPEC"},
    }


def test_requests_are_the_golden_ones(hub: StandIn, jobs: Command, run_file: Path):
    said = jobs(
        *("up", str(run_file), *TWO_SAMPLERS, "--flavor", "h200", "--flavor", "sampler=a10g-small"),
        *("--install", INSTALL, "--mount", "hf://buckets/alice/grpo/wheels:/grpo:ro"),
        *("--mount", "hf://datasets/alice/rows@main:/rows", "--timeout", "2.5"),
    )
    assert said.code == 0, said.err
    found = {body["labels"]["grpo-slot"]: without_what_changes(body) for body in hub.bodies}
    assert list(found) == ALL
    golden = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}
    assert found == golden


def test_dry_run_prints_the_requests_to_the_letter_and_sends_none(hub: StandIn, up: Command):
    said = up(*TWO_SAMPLERS, "--dry-run", "--json")
    assert hub.created() == 0
    told = json.loads(said.out)
    assert told["url"] == f"{hub.url}/api/jobs/alice"
    assert told["usd_per_hour"] == pytest.approx(3 * 1.0 + 0.01 + 0.03)
    assert told["usd_max"] == pytest.approx(12 * (3 * 1.0 + 0.03) + 24 * 0.01)
    assert up(*TWO_SAMPLERS).code == 0
    assert [without_what_changes(body) for body in told["requests"]] == list(
        map(without_what_changes, hub.bodies)
    )


def test_dry_run_for_a_person_ends_with_the_bill(up: Command):
    said = up("--dry-run")
    assert said.out.startswith("POST http")
    assert "about $2.04 an hour" in said.out.splitlines()[-1]


def test_secrets_go_along_as_secrets_and_nowhere_else(hub: StandIn, up: Command, here: Path):
    dry, said = up("--dry-run"), up(*TWO_SAMPLERS)
    secrets = {value for body in hub.bodies for value in body["secrets"].values()}
    assert TOKEN in secrets
    # A token for the Hub, the broker's keys, a key for each node, and a login for each but the broker.
    assert len(secrets) == 1 + 1 + len(ALL) + len(ALL) - 1
    rest = json.dumps([{k: v for k, v in body.items() if k != "secrets"} for body in hub.bodies])
    spoken = dry.out + dry.err + said.out + said.err + rest
    assert not [secret for secret in secrets if secret in spoken]
    kept = here / "home" / "jobs" / "alice" / "sums.json"
    assert kept.stat().st_mode & 0o077 == 0
    assert TOKEN not in kept.read_text()
    assert kept.with_suffix(".creds").stat().st_mode & 0o077 == 0


def test_each_job_gets_a_login_of_its_own_role_and_name_and_no_other(hub: StandIn, up: Command):
    up(*TWO_SAMPLERS)
    given = {body["labels"]["grpo-slot"]: body["secrets"] for body in hub.bodies}
    assert given.pop("broker").keys() == {"GRPO_BROKER_KEYS", "GRPO_IDENTITY", "HF_TOKEN"}
    for slot, secrets in given.items():
        assert secrets.keys() == {"GRPO_JOIN", "GRPO_IDENTITY", "HF_TOKEN"}
        invitation = Invitation.parse(secrets["GRPO_JOIN"])
        assert (invitation.nodes, invitation.roles) == ((slot,), (slot.rpartition("-")[0],))


def test_jobs_may_show_the_hub_another_token(hub: StandIn, up: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRPO_JOBS_HF_TOKEN", "hf_writes_one_bucket")
    up()
    assert {body["secrets"]["HF_TOKEN"] for body in hub.bodies} == {"hf_writes_one_bucket"}


def test_jobs_that_only_read_may_have_a_token_that_only_reads(
    hub: StandIn, up: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GRPO_JOBS_HF_READ_TOKEN", "hf_reads")
    up()
    shown = {body["labels"]["grpo-slot"]: body["secrets"]["HF_TOKEN"] for body in hub.bodies}
    assert shown == {"broker": TOKEN, "learner-1": TOKEN, "sampler-1": "hf_reads", "verifier-1": "hf_reads"}


def test_up_again_starts_nothing(hub: StandIn, up: Command):
    up(*TWO_SAMPLERS)
    assert hub.live() == ALL
    again = up()  # it remembers how many
    assert hub.created() == len(ALL)
    assert again.err == ""


def test_up_again_starts_only_the_missing_slot_as_the_same_node(hub: StandIn, up: Command):
    up(*TWO_SAMPLERS)
    hub.end("learner-1", "ERROR", "Job was preempted")
    up()
    assert hub.created() == len(ALL) + 1
    first, again = [body for body in hub.bodies if body["labels"]["grpo-slot"] == "learner-1"]
    assert first == again
    key = Identity("learner-1", first["secrets"]["GRPO_IDENTITY"].encode()).public_key
    others = {body["secrets"]["GRPO_IDENTITY"] for body in hub.bodies if body is not first}
    assert key not in json.dumps(hub.jobs)
    assert len(others) == len(ALL)


def test_scale_starts_and_cancels_the_highest_numbers(hub: StandIn, up: Command, jobs: Command):
    up(*TWO_SAMPLERS)
    jobs("scale", "sums", "--samplers", "4")
    assert [slot for slot in hub.live() if slot.startswith("s")] == [f"sampler-{i}" for i in range(1, 5)]
    said = jobs("scale", "sums", "--samplers", "1", "--verifiers", "0")
    assert hub.live() == ["broker", "learner-1", "sampler-1"]
    assert said.err.splitlines() == ["cancelled verifier-1", *(f"cancelled sampler-{i}" for i in (2, 3, 4))]


def test_down_cancels_what_lives_and_the_broker_last(hub: StandIn, up: Command, jobs: Command):
    up(*TWO_SAMPLERS)
    hub.end("sampler-1", "COMPLETED")
    hub.end("verifier-1", "ERROR")
    said = jobs("down", "sums")
    assert hub.live() == []
    assert said.err.splitlines() == ["cancelled sampler-2", "cancelled learner-1", "cancelled broker"]
    assert said.out.startswith("cancelled 3 jobs of run sums")
    assert jobs("down", "sums").out == "no job of run sums lives in alice\n"


def test_up_after_down_is_the_same_swarm(hub: StandIn, up: Command, jobs: Command):
    up(*TWO_SAMPLERS)
    jobs("down", "sums")
    up()
    assert hub.live() == ALL
    assert hub.bodies[: len(ALL)] == hub.bodies[len(ALL) :]


def test_status_shows_slots_costs_and_the_way_in(hub: StandIn, up: Command, jobs: Command):
    up(*TWO_SAMPLERS)
    hub.end("sampler-2", "ERROR", "OOM\x1b[31m")
    told = json.loads(jobs("status", "sums", "--json").out)
    assert told["address"].startswith("wss://")
    assert told["address"].endswith("--8000.hf.jobs")
    assert {job["slot"]: job["stage"] for job in told["jobs"]}["sampler-2"] == "ERROR"
    assert told["usd_per_hour"] == pytest.approx(2 * FLAVORS["a10g-small"] + 0.04)
    shown = jobs("status", "sums").out
    assert "4 of 5 live, about $2.04 an hour" in shown
    assert "\x1b" not in shown


def test_stolen_logins_are_made_anew_and_nodes_stay_who_they_are(hub: StandIn, up: Command, jobs: Command):
    up()
    assert "with secrets that this machine does not have" in up("--new-logins").line
    jobs("down", "sums")
    assert up("--new-logins").code == 0
    first, again = hub.bodies[:4], hub.bodies[4:]
    for before, after in zip(first, again, strict=True):
        assert before["secrets"]["GRPO_IDENTITY"] == after["secrets"]["GRPO_IDENTITY"]
        for login in {"GRPO_JOIN", "GRPO_BROKER_KEYS"} & before["secrets"].keys():
            assert before["secrets"][login] != after["secrets"][login]
    assert up().code == 0
    assert hub.created() == 8


def test_a_machine_elsewhere_gets_one_line_for_one_role(hub: StandIn, up: Command, jobs: Command):
    up()
    words = [jobs("invite", "sums", "--role", "sampler", *more).out for more in ((), ("--number", "2"))]
    invited = [Invitation.parse(word.removeprefix("grpo-node --join ").strip()) for word in words]
    assert [each.nodes for each in invited] == [("sampler-guest-1",), ("sampler-guest-2",)]
    assert {each.roles for each in invited} == {("sampler",)}
    assert invited[0].url == json.loads(jobs("status", "sums", "--json").out)["address"]
    hub.end("broker", "ERROR")
    assert "the broker of sums has no address yet" in jobs("invite", "sums", "--role", "sampler").line


def test_logs_are_those_of_the_job_that_counts(hub: StandIn, up: Command, jobs: Command):
    up()
    assert jobs("logs", "sums", "learner-1").out == "here is sums-learner-1\n"
    shown = jobs("logs", "sums").out.splitlines()
    assert shown[0] == "broker: here is sums-broker"
    assert len(shown) == 4
    job = next(job for job in hub.jobs.values() if job["labels"]["grpo-slot"] == "learner-1")
    hub.logs[job["id"]] += ["one", "two\x1b[2J"]
    assert jobs("logs", "sums", "learner-1", "--tail", "2").out == "one\ntwo [2J\n"


def test_a_long_name_of_a_run_fits_the_hubs_rules(hub: StandIn, jobs: Command, here: Path):
    name = "a" * 47 + "1"
    (here / "long.toml").write_text(RUN_FILE.replace("sums", name))
    assert jobs("up", "long.toml", "--install", "none").code == 0
    assert {body["network"]["group"] for body in hub.bodies} != {f"grpo-{name}"}
