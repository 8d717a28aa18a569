"""``jobs up --keep``: what dies is started again, who leaves a finished run is not, and then it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from node.hub_jobs import HubJobs
from node.job_keeper import JobKeeper
from node.job_plan import HubTokens, SwarmSecrets, SwarmSpec, plan
from node.job_swarm import JobSwarm
from protocol.errors import OperatorError
from tests.command import Command
from tests.jobs.standin import TOKEN, Fault, StandIn

EVERY_S = 0.05


class Kept:
    """A swarm that runs, with its keeper, and one incident each time that the Hub is asked for its jobs."""

    def __init__(self, hub: StandIn, swarm: SwarmSpec, patience_s: float = 5.0) -> None:
        self.hub = hub
        self.said: list[str] = []
        client = HubJobs(hub.url, TOKEN, "alice", pause_s=0.01, call_s=5.0, patience_s=patience_s)
        requests = plan(swarm, SwarmSecrets(), HubTokens(TOKEN, TOKEN), lambda _name: None)
        self._jobs = JobSwarm(client, swarm, requests, self.said.append)
        self._keeper = JobKeeper(client, self._jobs, swarm.run, self.said.append)
        self._incidents: list[Callable[[], object] | None] = []

    async def keep(self, *incidents: Callable[[], object] | None, leave_s: float = 120.0) -> None:
        await self._jobs.start()
        self._incidents = [None, *incidents]  # the first look is at what was before
        self.hub.on_list = self._next
        await self._keeper.keep(EVERY_S, leave_s)

    def _next(self) -> None:
        if self._incidents and (incident := self._incidents.pop(0)) is not None:
            incident()


def leave(hub: StandIn, *slots: str) -> None:
    for slot in slots:
        hub.end(slot, "COMPLETED")


async def test_what_dies_is_started_again_until_the_run_is_finished(hub: StandIn, swarm: SwarmSpec):
    kept = Kept(hub, swarm)
    await kept.keep(
        lambda: hub.end("sampler-1", "ERROR", "preempted"),
        *(None,) * 3,
        lambda: hub.end("learner-1", "ERROR", "preempted"),
        *(None,) * 3,
        lambda: leave(hub, "verifier-1", "sampler-1", "learner-1", "broker"),
    )
    assert hub.stages() == {
        "broker": ["COMPLETED"],
        "learner-1": ["ERROR", "COMPLETED"],
        "sampler-1": ["ERROR", "COMPLETED"],
        "verifier-1": ["COMPLETED"],
    }
    assert "learner-1 ended: ERROR preempted" in kept.said
    assert kept.said[-1] == "run sums is finished"


async def test_peers_that_left_a_finished_run_are_not_started_again_and_who_stays_is_cancelled(
    hub: StandIn, swarm: SwarmSpec
):
    await Kept(hub, swarm).keep(
        lambda: leave(hub, "verifier-1"), None, lambda: leave(hub, "learner-1", "broker"), leave_s=2.0
    )
    assert hub.created() == 4
    assert hub.stages()["sampler-1"] == ["CANCELED"]


async def test_peer_that_left_a_run_that_goes_on_is_started_again(hub: StandIn, swarm: SwarmSpec):
    kept = Kept(hub, swarm)

    def leave_once_it_is_back() -> None:
        hub.on_start = lambda _job, _body: leave(hub, "verifier-1", "sampler-1", "learner-1", "broker")
        leave(hub, "sampler-1")

    await kept.keep(leave_once_it_is_back, leave_s=0.2)
    assert hub.stages()["sampler-1"] == ["COMPLETED", "COMPLETED"]


async def test_slot_that_dies_young_again_and_again_is_given_up(hub: StandIn, swarm: SwarmSpec):
    def die(job: dict[str, Any], _body: object) -> None:
        if job["labels"]["grpo-slot"] == "sampler-1":
            hub.end("sampler-1", "ERROR", "exit code 2")

    def begin_to_die() -> None:
        hub.on_start = die
        hub.end("sampler-1", "ERROR")

    with pytest.raises(OperatorError, match="sampler-1 dies young again and again: grpo-node jobs logs"):
        await Kept(hub, swarm).keep(begin_to_die)
    assert hub.stages()["sampler-1"] == ["ERROR"] * 3
    assert hub.live() == ["broker", "learner-1", "verifier-1"]


async def test_hub_that_fails_for_a_while_is_asked_again(hub: StandIn, swarm: SwarmSpec):
    kept = Kept(hub, swarm, patience_s=0.5)

    def storm() -> None:
        hub.faults.append(Fault("POST /api/jobs/alice$", says="storm", count=8))
        hub.end("sampler-1", "ERROR")

    everybody = ("verifier-1", "sampler-1", "learner-1", "broker")
    hub.on_start = lambda _job, _body: leave(hub, *everybody) if len(hub.jobs) == 5 else None
    await kept.keep(storm)
    assert [line for line in kept.said if "the Hub failed (500): storm; looking again" in line]
    assert hub.stages()["sampler-1"] == ["ERROR", "COMPLETED"]


def test_finished_run_is_not_started_again(hub: StandIn, up: Command):
    up()
    leave(hub, "sampler-1", "learner-1", "broker")
    hub.end("verifier-1", "ERROR")
    said = up()
    assert said.code == 0
    assert "run sums is finished: nothing to start" in said.err
    assert hub.created() == 4


def test_keep_ends_with_the_run(hub: StandIn, up: Command):
    everybody = ("sampler-1", "verifier-1", "learner-1", "broker")
    looks = iter(range(100))
    hub.on_list = lambda: leave(hub, *everybody) if next(looks) == 4 else None
    said = up("--keep", "--every", "0.1")
    assert said.code == 0
    assert said.err.splitlines()[-1] == "run sums is finished"
