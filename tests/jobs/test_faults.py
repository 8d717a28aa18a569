"""The Hub fails, refuses, stalls or answers late: no job is doubled, no secret told, no traceback shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from node.hub_job_errors import Answered, HubUnavailable, told
from node.hub_jobs import HubJobs
from node.job_plan import HubTokens, JobRequest, Slot, SwarmSecrets, SwarmSpec, plan
from node.job_swarm import JobSwarm, cancel_all
from tests.command import Command
from tests.jobs.standin import TOKEN, Fault, StandIn

Requests = dict[Slot, JobRequest]

CREATE = "POST /api/jobs/alice$"


@pytest.fixture
def client(hub: StandIn) -> HubJobs:
    return HubJobs(hub.url, TOKEN, "alice", pause_s=0.01, call_s=5.0, patience_s=30.0)


@pytest.fixture
def requests(swarm: SwarmSpec) -> Requests:
    return plan(swarm, SwarmSecrets(), HubTokens(TOKEN, TOKEN), lambda _name: None)


@pytest.fixture
def learner(requests: Requests) -> JobRequest:
    return next(request for slot, request in requests.items() if slot.kind == "learner")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(CREATE, applied=True),
        Fault(CREATE, status=502, applied=True),
        Fault(CREATE, cut=True, applied=True),
        Fault(CREATE, stall=True, applied=True),
    ],
    ids=["500", "502", "cut", "stall"],
)
async def test_job_that_was_created_although_the_hub_failed_is_not_doubled(
    hub: StandIn, learner: JobRequest, fault: Fault
):
    client = HubJobs(hub.url, TOKEN, "alice", pause_s=0.01, call_s=1.0)
    hub.faults.append(fault)
    job = await client.create(learner)
    assert list(hub.jobs) == [job.id]
    assert hub.created() == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(CREATE, count=2),
        Fault(CREATE, status=503, count=2),
        Fault(CREATE, cut=True),
        Fault(CREATE, status=429, count=2, headers={"Retry-After": "0"}),
    ],
    ids=["500", "503", "cut", "429"],
)
async def test_job_that_was_not_created_is_sent_again(
    hub: StandIn, client: HubJobs, learner: JobRequest, fault: Fault
):
    hub.faults.append(fault)
    await client.create(learner)
    assert hub.live() == ["learner-1"]
    assert hub.created() > 1


async def test_job_of_an_earlier_life_is_not_taken_for_the_one_that_seems_lost(
    hub: StandIn, client: HubJobs, learner: JobRequest
):
    await client.create(learner)
    hub.end("learner-1", "ERROR")
    hub.faults.append(Fault(CREATE))
    await client.create(learner)
    assert hub.stages() == {"learner-1": ["ERROR", "RUNNING"]}


async def test_a_hub_that_goes_on_failing_is_called_unavailable(hub: StandIn, learner: JobRequest):
    client = HubJobs(hub.url, TOKEN, "alice", pause_s=0.01, patience_s=1.0)
    hub.faults.append(Fault(CREATE, count=99, says="internal"))
    with pytest.raises(
        HubUnavailable, match=r"job sums-learner-1 in alice on a10g-small: .*\(500\): internal"
    ):
        await client.create(learner)
    assert hub.created() > 1


async def test_pause_that_the_hub_asks_for_is_bounded(hub: StandIn, client: HubJobs):
    headers = {"RateLimit": '"api";r=0;t=86400'}
    hub.faults.append(Fault(CREATE, status=429, headers=headers))
    with pytest.raises(HubUnavailable, match="too many requests") as caught:
        await client._client.once(
            lambda api: api.run_job(image="a", command=["b"], namespace="alice"),
            lambda exc: told(exc, "x", ()),
        )
    assert caught.value.wait_s == 300


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404])
async def test_refusal_is_not_repeated(hub: StandIn, client: HubJobs, learner: JobRequest, status: int):
    hub.faults.append(Fault(CREATE, status=status, count=99))
    with pytest.raises(Answered, match=rf"\({status}\): injected$"):
        await client.create(learner)
    assert hub.created() == 1


async def test_what_the_hub_says_is_told_without_secrets(hub: StandIn, client: HubJobs, learner: JobRequest):
    quoted = f"bad request: {dict(learner.secrets)}\x1b[31m"
    hub.faults.append(Fault(CREATE, status=400, says=quoted))
    with pytest.raises(Answered) as caught:
        await client.create(learner)
    assert "bad request" in str(caught.value)
    assert not [secret for secret in learner.secrets.values() if secret in str(caught.value)]
    assert str(caught.value).isprintable()
    assert not [secret for secret in learner.secrets.values() if secret in repr(learner)]


async def test_hub_that_never_answers_is_given_up(hub: StandIn):
    client = HubJobs(hub.url, TOKEN, "alice", pause_s=0.01, call_s=0.2, patience_s=1.0)
    hub.faults.append(Fault("hardware", stall=True, count=99))
    with pytest.raises(HubUnavailable, match=r"hardware: the Hub did not answer in 0\.\d+ s"):
        await client.hardware()


async def test_hub_that_is_not_there_is_named_so(hub: StandIn):
    client = HubJobs("http://127.0.0.1:1", TOKEN, "alice", pause_s=0.01, patience_s=1.0)
    with pytest.raises(HubUnavailable, match="cannot be reached"):
        await client.hardware()


async def test_list_that_fails_once_is_asked_for_again(hub: StandIn, client: HubJobs, learner: JobRequest):
    await client.create(learner)
    hub.faults.append(Fault("GET /api/jobs/alice$"))
    assert [job.slot for job in await client.jobs_of("sums")] == ["learner-1"]


@pytest.mark.parametrize(
    "fault", [Fault("/cancel"), Fault("/cancel", applied=True), Fault("/cancel", cut=True)]
)
async def test_cancelling_survives_a_fault(
    hub: StandIn, client: HubJobs, requests: Requests, swarm: SwarmSpec, fault: Fault
):
    jobs = await JobSwarm(client, swarm, requests, lambda _text: None).start()
    hub.faults.append(fault)
    assert await cancel_all(client, jobs, lambda _text: None) == 4
    assert hub.live() == []


async def test_job_that_ends_while_it_is_cancelled_is_no_fault(
    hub: StandIn, client: HubJobs, learner: JobRequest
):
    job = await client.create(learner)
    hub.end("learner-1", "COMPLETED")
    await client.cancel(job)
    gone = await client.create(learner)
    del hub.jobs[gone.id]
    await client.cancel(gone)
    assert hub.stages() == {"learner-1": ["COMPLETED"]}


async def test_cancelling_that_is_refused_says_so(hub: StandIn, client: HubJobs, learner: JobRequest):
    job = await client.create(learner)
    hub.faults.append(Fault("/cancel", status=403, count=99))
    with pytest.raises(Answered, match="403"):
        await client.cancel(job)


async def test_second_job_in_a_slot_that_came_late_is_cancelled(
    hub: StandIn, client: HubJobs, requests: Requests, swarm: SwarmSpec, learner: JobRequest
):
    said: list[str] = []
    first = await client.create(learner)
    client._api.run_job(**client._arguments(learner))
    await JobSwarm(client, swarm, requests, said.append).start()
    assert hub.stages()["learner-1"] == ["RUNNING", "CANCELED"]
    assert hub.jobs[first.id]["status"]["stage"] == "RUNNING"
    assert [line for line in said if line.startswith("learner-1 was started twice")]


def test_what_is_logged_does_not_get_into_what_is_piped(hub: StandIn, up: Command):
    hub.faults.append(Fault(CREATE, count=1))
    said = up("--json")
    assert len(json.loads(said.out)["jobs"]) == 4
    assert "hub_call_failed" in said.err


def change_of_run_file(hub: StandIn, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "run.toml").write_text((here / "run.toml").read_text() + "\n[learner]\nupdates = 7\n")


def loss_of_secrets(hub: StandIn, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "home" / "jobs" / "alice" / "sums.json").unlink()


def garbled_memory(hub: StandIn, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "home" / "jobs" / "alice" / "sums.json").write_text('{"keys": "s3cret"')


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_of_run_file, "with other settings; restore the run file"),
        (loss_of_secrets, "with secrets that this machine does not have"),
        (garbled_memory, "is not what this version wrote"),
    ],
)
def test_swarm_that_lives_is_not_mixed_with_another(
    hub: StandIn,
    up: Command,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[StandIn, Path, pytest.MonkeyPatch], None],
    says: str,
):
    up()
    hub.end("sampler-1", "ERROR")
    change(hub, here, monkeypatch)
    said = up()
    assert said.code == 2
    assert says in said.line
    assert "s3cret" not in said.err
    assert hub.created() == 4
