"""How ``grpo-node jobs`` shows jobs, requests and costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from node.job_plan import SwarmSpec
from protocol.errors import one_line

if TYPE_CHECKING:
    from node.hub_jobs import Flavor, Job
    from node.job_swarm import Costs

STUCK_S = 900.0
"""A job that waits this long for hardware may wait for hours."""


def dry_run_lines(
    url: str, bodies: Sequence[Mapping[str, Any]], slots: int, price: Costs, *, as_json: bool
) -> list[str]:
    """The requests as they would be sent, secrets struck out, and the bill."""
    if as_json:
        return [json.dumps({"url": url, "requests": list(bodies), **_price(price)})]
    shown = [f"POST {url}\n{json.dumps(body, indent=2)}" for body in bodies]
    return [
        *shown,
        f"{len(bodies)} requests, {slots - len(bodies)} of {slots} jobs live already",
        bill(price),
    ]


def summary(swarm: SwarmSpec, price: Costs) -> str:
    """What a person does next."""
    return f"{bill(price)}\nthen: grpo-node jobs status {swarm.run}, or jobs logs, jobs scale, jobs down"


def bill(price: Costs) -> str:
    """Costs in one line."""
    return (
        f"about ${price.usd_per_hour:.2f} an hour while all jobs run; their timeouts end them at "
        f"${price.usd_max:.2f} at the latest"
    )


def as_objects(swarm: SwarmSpec, jobs: Sequence[Job], price: Costs) -> dict[str, Any]:
    """For a script."""
    return {
        "run": swarm.run,
        "namespace": swarm.namespace,
        "jobs": [_object(job) for job in jobs],
        **_price(price),
    }


def lines(
    run: str,
    jobs: Sequence[Job],
    hardware: Mapping[str, Flavor],
    *,
    as_json: bool,
    now: datetime | None = None,
) -> list[str]:
    """Every slot's job, the way in from outside, and what the live ones cost."""
    from node.job_swarm import current

    counted = sorted(current(jobs).values(), key=lambda job: job.slot)
    live = [job for job in counted if job.live]
    hourly = sum(hardware[job.flavor].usd_per_hour for job in live if job.flavor in hardware)
    address = address_of(jobs)
    if as_json:
        found = {"run": run, "jobs": [_object(job) for job in counted], "usd_per_hour": hourly}
        return [json.dumps({**found, "address": address})]
    if not counted:
        return [f"run {run} has no jobs"]
    shown = [_line(job, now or datetime.now(UTC)) for job in counted]
    shown.append(f"{len(live)} of {len(counted)} live, about ${hourly:.2f} an hour")
    if address:
        shown.append(f"from outside: {address}; who joins there: grpo-node jobs invite {run} --role sampler")
    return shown


def address_of(jobs: Sequence[Job]) -> str | None:
    """Where the broker is reached from elsewhere, once its job runs."""
    from node.job_swarm import current

    broker = current(jobs).get("broker")
    return next(map(wss, broker.exposed), None) if broker is not None and broker.live else None


def wss(url: str) -> str:
    """An exposed port's address for a WebSocket."""
    return url.replace("https://", "wss://", 1).replace("http://", "ws://", 1)


def _line(job: Job, now: datetime) -> str:
    waits = (now - job.created_at).total_seconds()
    note = one_line(job.message)
    if job.stage == "SCHEDULING" and waits > STUCK_S:
        note = f"waits for hardware for {waits / 60:.0f} min; another --flavor may be free"
    return f"{job.slot:<14} {job.stage:<11} {job.flavor:<14} {job.page}  {note}".rstrip()


def _object(job: Job) -> dict[str, Any]:
    return {
        "slot": job.slot,
        "id": job.id,
        "stage": job.stage,
        "flavor": job.flavor,
        "page": job.page,
        "message": job.message,
    }


def _price(price: Costs) -> dict[str, float]:
    return {"usd_per_hour": round(price.usd_per_hour, 4), "usd_max": round(price.usd_max, 2)}
