"""The Hub's Jobs over real HTTP, as far as the real client asks: no kinder than the real one.

Secrets never come back, lists come in pages, addresses of exposed ports only once a job runs, and a job that
has ended cannot be cancelled.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from aiohttp import web

TOKEN = "hf_alice_secret"
TOKENS = {TOKEN: "alice", "hf_bob_secret": "bob"}
FLAVORS = {"cpu-basic": 0.01, "cpu-upgrade": 0.03, "a10g-small": 1.0, "h200": 5.0}
"""US dollars an hour; some are told by the minute, as the real list does."""
LABEL = re.compile(r"[A-Za-z0-9_.-]{0,100}")
GROUP = re.compile(r"[a-z0-9-]{1,46}")
ALIAS = re.compile(r"[a-z0-9-]{1,34}")
ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Fault:
    """The next ``count`` requests that ``match`` ("METHOD /path") fits go wrong."""

    match: str
    status: int = 500
    count: int = 1
    applied: bool = False
    """Do what was asked, then answer with the fault."""
    stall: bool = False
    """Never answer."""
    cut: bool = False
    """Hang up instead of answering."""
    headers: dict[str, str] = field(default_factory=dict)
    says: str = "injected"


class StandIn:
    """The server, on a thread of its own; tests read and write its attributes."""

    def __init__(self, *, page_size: int = 2, starts: bool = True) -> None:
        self.page_size = page_size
        self.starts = starts
        """Whether jobs run at once; otherwise they wait for hardware."""
        self.jobs: dict[str, dict[str, Any]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.seen: list[str] = []
        self.faults: list[Fault] = []
        self.logs: dict[str, list[str]] = {}
        self.on_start: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
        """Called with a new job and its whole request, secrets included."""
        self.on_list: Callable[[], None] | None = None
        """Called before jobs are listed."""
        self.on_cancel: Callable[[dict[str, Any]], None] | None = None
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="stand-in", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    # --- what tests ask

    def stages(self) -> dict[str, list[str]]:
        """Stages of all jobs of each slot, in order of creation."""
        found: dict[str, list[str]] = {}
        for job in self.jobs.values():
            found.setdefault(job["labels"]["grpo-slot"], []).append(job["status"]["stage"])
        return found

    def live(self) -> list[str]:
        """Slots with a job that has not ended, one entry a job."""
        return sorted(
            job["labels"]["grpo-slot"] for job in self.jobs.values() if job["status"]["stage"] not in ENDED
        )

    def end(self, slot: str, stage: str, message: str | None = None) -> None:
        """End the live job of a slot."""
        job = next(
            job
            for job in self.jobs.values()
            if job["labels"]["grpo-slot"] == slot and job["status"]["stage"] not in ENDED
        )
        self.finish(job, stage, message)

    def finish(self, job: dict[str, Any], stage: str, message: str | None) -> None:
        """A job ends."""
        job["finishedAt"] = now()
        job["status"] = {"stage": stage, "message": message}

    def created(self) -> int:
        """How often a job was asked for."""
        return sum(entry.startswith("POST") and entry.count("/") == 3 for entry in self.seen)

    def answer_all(self) -> None:
        """End every stall."""
        self._loop.call_soon_threadsafe(self._answers.set)

    # --- the server

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._stop, self._answers = asyncio.Event(), asyncio.Event()
        app = web.Application(middlewares=[self._middleware])
        app.router.add_get("/api/whoami-v2", self._whoami)
        app.router.add_get("/api/jobs/hardware", self._hardware)
        app.router.add_post("/api/jobs/{ns}", self._create)
        app.router.add_get("/api/jobs/{ns}", self._list)
        app.router.add_get("/api/jobs/{ns}/{id}", self._inspect)
        app.router.add_get("/api/jobs/{ns}/{id}/logs", self._logs)
        app.router.add_post("/api/jobs/{ns}/{id}/cancel", self._cancel)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        entry = f"{request.method} {request.path}"
        self.seen.append(entry)
        for fault in self.faults:
            if fault.count > 0 and re.search(fault.match, entry):
                fault.count -= 1
                if fault.applied:
                    await handler(request)
                if fault.stall:
                    await self._answers.wait()
                if fault.cut:
                    assert request.transport is not None
                    request.transport.close()
                return refused(fault.status, fault.says, fault.headers)
        if self._who(request) is None:
            return refused(401, "Invalid username or password.")
        namespace = request.match_info.get("ns")
        if namespace is not None and namespace not in {*TOKENS.values(), "a-team"}:
            return refused(404, "Namespace not found")
        if namespace is not None and namespace != self._who(request):
            return refused(403, "You don't have the required permissions")
        return await handler(request)

    def _who(self, request: web.Request) -> str | None:
        return TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))

    async def _whoami(self, request: web.Request) -> web.Response:
        return web.json_response({"type": "user", "name": self._who(request), "orgs": []})

    async def _hardware(self, _request: web.Request) -> web.Response:
        gpu = {"type": "gpu", "model": "A10G", "quantity": "1", "vram": "24 GB", "manufacturer": "Nvidia"}
        return web.json_response(
            [
                {
                    "name": name,
                    "prettyName": name,
                    "cpu": "2 vCPU",
                    "ram": "16 GB",
                    "accelerator": None if name.startswith("cpu") else gpu,
                    "unitCostMicroUSD": round(1e6 * hourly / 60),
                    "unitCostUSD": hourly if name == "h200" else hourly / 60,
                    "unitLabel": "hour" if name == "h200" else "minute",
                }
                for name, hourly in FLAVORS.items()
            ]
        )

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if fault := fault_in(body):
            return fault
        self.bodies.append(body)
        identifier = f"{len(self.jobs):024x}"
        namespace = request.match_info["ns"]
        job = {
            "id": identifier,
            "createdAt": now(),
            **{
                key: body.get(key) for key in ("dockerImage", "command", "arguments", "environment", "flavor")
            },
            **{key: body.get(key) for key in ("labels", "volumes", "network", "expose")},
            "secrets": dict.fromkeys(body.get("secrets", {})),
            "status": {"stage": "SCHEDULING", "message": None},
            "owner": {"id": namespace, "name": namespace, "type": "user"},
        }
        self.jobs[identifier] = job
        self.logs.setdefault(
            identifier, ["===== Job started at noon =====", f"here is {job['labels']['name']}"]
        )
        if self.starts:
            self.start(job)
        if self.on_start is not None:
            self.on_start(job, body)
        return web.json_response(job)

    def start(self, job: dict[str, Any]) -> None:
        """A machine was found for it."""
        ports = (job["expose"] or {}).get("ports", [])
        urls = [f"https://{job['id']}--{port}.hf.jobs" for port in ports]
        job["status"] = {"stage": "RUNNING", "message": None, "exposeUrls": urls or None}
        job["startedAt"] = now()

    async def _list(self, request: web.Request) -> web.Response:
        if self.on_list is not None and "cursor" not in request.query:
            self.on_list()
        wanted = dict(label.split("=", 1) for label in request.query.getall("label", []))
        found = [
            job
            for job in reversed(self.jobs.values())  # the newest first
            if job["owner"]["name"] == request.match_info["ns"]
            and all((job["labels"] or {}).get(key) == value for key, value in wanted.items())
        ]
        begin = int(request.query.get("cursor", "0"))
        end = begin + self.page_size
        headers = {}
        if end < len(found):
            following = request.url.update_query({"cursor": str(end)})
            headers["Link"] = f'<{following}>; rel="next"'
        return web.json_response(found[begin:end], headers=headers)

    async def _inspect(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["id"])
        return web.json_response(job) if job else refused(404, "Job not found")

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return refused(404, "Job not found")
        if job["status"]["stage"] in ENDED:
            return refused(400, "Job has ended already")
        if self.on_cancel is not None:
            self.on_cancel(job)
        self.finish(job, "CANCELED", None)
        return web.json_response(job)

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if request.match_info["id"] not in self.jobs:
            return refused(404, "Job not found")
        await response.prepare(request)
        said = self.logs[request.match_info["id"]]
        for line in said[-int(request.query.get("tail", len(said))) :]:
            await response.write(f"data: {json.dumps({'timestamp': now(), 'data': line})}\n\n".encode())
        return response


def fault_in(body: dict[str, Any]) -> web.Response | None:
    """What the real server checks before it takes a job."""
    if body["flavor"] not in FLAVORS:
        return refused(404, f"Flavor {body['flavor']} not found")
    if not all(LABEL.fullmatch(text) for pair in body.get("labels", {}).items() for text in pair):
        return refused(400, "labels: only letters, digits, - and _, at most 100")
    network = body.get("network")
    if network and not (GROUP.fullmatch(network["group"]) and all(map(ALIAS.fullmatch, network["aliases"]))):
        return refused(400, f"network: no such name: {network}")
    return None


def refused(status: int, says: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": says}, status=status, headers=headers)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
