"""Keeps a swarm of jobs up: looks, starts again what died, and stops when the run is finished.

Which end of a job is a death? A peer's job completes when it leaves a finished run, and also when it was told
to stop in order. The broker's job tells which: it completes soon after if the run is finished, and only then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from math import inf

from node.hub_job_errors import HubUnavailable
from node.hub_jobs import HubJobs, Job
from node.job_swarm import JobSwarm, Say, by_slot, cancel_all, is_finished
from protocol.errors import OperatorError

LEAVE_S = 120.0
"""How long the others may take to leave after the first has."""
QUICK_DEATH_S = 300.0
"""A job that ends sooner than this after its start has hardly begun."""
QUICK_DEATHS_MAX = 3
"""So many in a row in one slot are no bad luck."""


class JobKeeper:
    """Looks after one swarm, for as long as somebody lets it."""

    def __init__(self, hub: HubJobs, jobs: JobSwarm, run: str, say: Say) -> None:
        self._hub = hub
        self._jobs = jobs
        self._run = run
        self._say = say
        self._ended: dict[str, float] = {}
        """When each end was first seen, on this machine's own clock."""

    async def keep(self, every_s: float, leave_s: float = LEAVE_S) -> None:
        """Start again whatever dies, until the run is finished.

        A Hub that fails for a while is asked again. Raises OperatorError if one slot's jobs die young again
        and again.
        """
        before = frozenset(job.id for job in await self._hub.jobs_of(self._run) if not job.live)
        self._ended.update(dict.fromkeys(before, -inf))
        while True:
            try:
                jobs = await self._hub.jobs_of(self._run)
                self._look(jobs)
                if await self._is_over(jobs, leave_s):
                    return
                self._check_deaths([job for job in jobs if job.id not in before])
                if not self._may_be_over(jobs, leave_s):
                    await self._jobs.start()
            except HubUnavailable as exc:
                self._say(f"{exc}; looking again in {every_s:g} s")
            await asyncio.sleep(every_s)

    def _look(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not job.live and job.id not in self._ended:
                self._ended[job.id] = time.monotonic()
                self._say(f"{job.slot} ended: {job.stage} {job.message}".rstrip())

    async def _is_over(self, jobs: Sequence[Job], leave_s: float) -> bool:
        """Whether the run is finished and everybody has left, or was made to."""
        if not is_finished(jobs):
            return False
        if any(job.live for job in jobs) and self._recent(by_slot(jobs)["broker"][-1], leave_s):
            return False
        await cancel_all(self._hub, jobs, self._say)
        self._say(f"run {self._run} is finished")
        return True

    def _may_be_over(self, jobs: Sequence[Job], leave_s: float) -> bool:
        last = [found[-1] for found in by_slot(jobs).values()]
        return any(job.stage == "COMPLETED" and self._recent(job, leave_s) for job in last)

    def _recent(self, job: Job, leave_s: float) -> bool:
        return time.monotonic() - self._ended[job.id] < leave_s

    def _check_deaths(self, jobs: Sequence[Job]) -> None:
        for slot, found in by_slot(jobs).items():
            last = found[-QUICK_DEATHS_MAX:]
            young = [job for job in last if not job.live and job.lived_s < QUICK_DEATH_S]
            if len(young) == QUICK_DEATHS_MAX:
                raise OperatorError(
                    f"{slot} dies young again and again: grpo-node jobs logs {self._run} {slot}"
                )
