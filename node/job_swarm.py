"""A swarm of jobs: start what is missing, end what is too much, keep it up. The Hub's list is the only state.

wanted slots ──┐
               ├─▶ missing ─▶ create          live, not wanted ─▶ cancel
live jobs ─────┘              two in one slot ─▶ cancel the younger
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from node.hub_jobs import Flavor, HubJobs, Job
from node.job_plan import JobRequest, Slot, SwarmSpec
from node.job_templates import KINDS
from protocol.errors import OperatorError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a swarm costs, by the Hub's own list."""

    usd_per_hour: float
    usd_max: float
    """If every job runs until its timeout ends it."""


def costs(requests: Sequence[JobRequest], hardware: Mapping[str, Flavor]) -> Costs:
    """Of all requests together. Raises OperatorError for a flavor that is not on offer."""
    for request in requests:
        if request.flavor not in hardware:
            raise OperatorError(
                f"no flavor {request.flavor!r} for {request.slot.name}; there are {', '.join(hardware)}"
            )
    hourly = [hardware[request.flavor].usd_per_hour for request in requests]
    longest = [hardware[r.flavor].usd_per_hour * r.timeout_s * r.attempts / 3600 for r in requests]
    return Costs(sum(hourly), sum(longest))


def by_slot(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Jobs of each slot, oldest first."""
    found: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        found[job.slot].append(job)
    return dict(found)


def current(jobs: Sequence[Job]) -> dict[str, Job]:
    """Of each slot the job that counts: the oldest live one, else the newest."""
    return {
        slot: next((job for job in found if job.live), found[-1]) for slot, found in by_slot(jobs).items()
    }


def is_finished(jobs: Sequence[Job]) -> bool:
    """Whether the run ended: its broker's job completes then, and only then."""
    broker = current(jobs).get("broker")
    return broker is not None and broker.stage == "COMPLETED"


class JobSwarm:
    """The jobs of one run, and what they should be."""

    def __init__(self, hub: HubJobs, swarm: SwarmSpec, requests: Mapping[Slot, JobRequest], say: Say) -> None:
        """``requests`` holds one for each slot of ``swarm``; nothing is done yet."""
        self._hub = hub
        self._swarm = swarm
        self._requests = requests
        self._say = say

    async def missing(self) -> list[JobRequest]:
        """What ``start`` would create now. Raises OperatorError if the jobs that live belong to another swarm
        of this run: started elsewhere with other secrets, or from another run file."""
        jobs = await self._hub.jobs_of(self._swarm.run)
        if is_finished(jobs):
            self._say(f"run {self._swarm.run} is finished: nothing to start; a new run wants a new name")
            return []
        live = {job.slot: job for job in jobs if job.live}
        for request in self._requests.values():
            job = live.get(request.slot.name)
            if job is not None:
                self._check_ours(job, request)
        return [request for slot, request in self._requests.items() if slot.name not in live]

    async def start(self) -> list[Job]:
        """Create what is missing, the broker first; returns all jobs of the run then. A run that is finished
        misses nothing."""
        for request in await self.missing():
            job = await self._hub.create(request)
            self._say(f"started {job.slot:<12} {job.flavor:<12} {job.page}")
        return await self._settled()

    async def trim(self) -> None:
        """Cancel what lives in slots that are not wanted."""
        wanted = {slot.name for slot in self._requests}
        surplus = [job for job in await self._hub.jobs_of(self._swarm.run) if job.slot not in wanted]
        await cancel_all(self._hub, surplus, self._say)

    def _check_ours(self, job: Job, request: JobRequest) -> None:
        first = f"run {self._swarm.run} has jobs already ({job.slot}: {job.page})"
        if job.mark != request.labels["grpo-key"]:
            raise OperatorError(
                f"{first} with secrets that this machine does not have; go on where they were started, or "
                f"end them: grpo-node jobs down {self._swarm.run}"
            )
        if job.spec_digest != request.labels["grpo-spec"]:
            raise OperatorError(
                f"{first} with other settings; restore the run file, or choose another name in it"
            )

    async def _settled(self) -> list[Job]:
        """All jobs, after ending the younger of two in one slot: a request that seemed lost may come late."""
        jobs = await self._hub.jobs_of(self._swarm.run)
        for found in by_slot(jobs).values():
            for job in [job for job in found if job.live][1:]:
                self._say(f"{job.slot} was started twice; cancelling {job.page}")
                await self._hub.cancel(job)
        return jobs


async def cancel_all(hub: HubJobs, jobs: Sequence[Job], say: Say) -> int:
    """Cancel those that live, the broker last, since peers that drain still need it; returns how many."""
    order: dict[str, int] = {kind: position for position, kind in enumerate(reversed(KINDS))}
    live = [job for job in jobs if job.live]
    for job in sorted(
        live, key=lambda job: (order.get(job.slot.rpartition("-")[0] or job.slot, 0), job.slot)
    ):
        await hub.cancel(job)
        say(f"cancelled {job.slot}")
    return len(live)
