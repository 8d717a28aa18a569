"""Jobs on the Hugging Face Hub: create, list, cancel, read; the one file that knows their client.

What may have taken effect is looked up by its labels before it is sent again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from typing import Any, Self, TypeVar

from huggingface_hub import HfApi, JobInfo, Volume, constants, get_token
from huggingface_hub._jobs_api import _create_job_spec
from huggingface_hub.errors import HfUriError
from huggingface_hub.utils import logging
from huggingface_hub.utils._hf_uris import parse_hf_mount

from node.hub_client import FAULTS, HubClient
from node.hub_job_errors import Answered, HubUnavailable, told
from node.job_plan import LABEL_KEY, LABEL_RUN, LABEL_SLOT, LABEL_SPEC, JobRequest
from node.off_loop import OffLoop
from node.patience import Patience
from protocol.errors import GrpoError, OperatorError

CALL_S = 60.0
"""One call with the client's own repetitions; the slowest are lists of many pages."""
PATIENCE_S = 120.0
"""How long a call is repeated; a person waits."""
PAUSE_S = 2.0
"""Before a call is repeated for the first time."""
THREADS = "hub-jobs"
LIVE = ("SCHEDULING", "RUNNING")
HIDDEN = "***"
HOURS = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1.0, "day": 24.0}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One job as the Hub tells of it."""

    id: str
    slot: str
    stage: str
    """SCHEDULING, RUNNING, COMPLETED, CANCELED, ERROR or DELETED."""
    flavor: str
    created_at: datetime
    mark: str
    """Which secrets it was given: ``SwarmSecrets.mark``."""
    spec_digest: str
    page: str
    """Where a browser shows it."""
    exposed: tuple[str, ...] = ()
    message: str = ""
    lived_s: float = 0.0
    """Seconds from its start, or else its creation, to its end; 0 while it lives."""

    @property
    def live(self) -> bool:
        """Whether it runs or will."""
        return self.stage in LIVE


@dataclass(frozen=True, slots=True)
class Flavor:
    """Hardware on offer."""

    name: str
    usd_per_hour: float
    text: str


class HubJobs:
    """The jobs of one namespace; every call says which, and with which token."""

    def __init__(
        self,
        endpoint: str,
        token: str,
        namespace: str,
        *,
        pause_s: float = PAUSE_S,
        call_s: float = CALL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """No I/O; ``HubJobs.open`` finds the arguments out."""
        self.endpoint = endpoint
        self.namespace = namespace
        self.token = token
        self._api = HfApi(endpoint=endpoint, token=token)
        self._client = HubClient(self._api, HubUnavailable, call_s, OffLoop(THREADS))
        self._pause_s = pause_s
        self._call_s = call_s
        self._patience_s = patience_s
        self._hidden: set[str] = {token}
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what it repeats in silence is told here, once

    @classmethod
    async def open(cls, endpoint: str | None, namespace: str | None) -> Self:
        """With the token of ``hf auth login`` (or HF_TOKEN), and its owner's namespace unless another is
        given. Raises OperatorError without a token, or with one that the Hub refuses."""
        token = get_token()
        if not token:
            raise OperatorError("not logged in to the Hub; run: hf auth login")
        hub = cls(endpoint or constants.ENDPOINT, token, namespace or "")
        if not namespace:
            hub.namespace = str((await hub._call(lambda api: api.whoami(token=token), "account"))["name"])
        return hub

    async def jobs_of(self, run: str) -> list[Job]:
        """All jobs of a run that the Hub still knows, oldest first. Raises like every call here:
        OperatorError for what a person must change, HubUnavailable."""
        found = await self._call(
            lambda api: list(
                api.list_jobs(
                    labels={LABEL_RUN: run},
                    namespace=self.namespace,
                    token=self.token,
                    timeout=ceil(self._call_s),
                )
            ),
            f"jobs of {self.namespace}",
        )
        jobs = [_job(info) for info in found if (info.labels or {}).get(LABEL_SLOT)]
        return sorted(jobs, key=lambda job: (job.created_at, job.id))

    async def create(self, request: JobRequest) -> Job:
        """Start a job; there will be one, however often the Hub fails on the way."""
        self._hidden.update(request.secrets.values())
        what = f"job {request.name} in {self.namespace} on {request.flavor}"
        return await self._call(
            lambda api: _job(api.run_job(**self._arguments(request))),
            what,
            # It may be there all the same: a second learner of one name would only be fenced.
            settled=lambda: self._live(request),
        )

    async def cancel(self, job: Job) -> None:
        """End a job; one that has ended by itself meanwhile is left as it is."""

        def end(api: HfApi) -> bool:
            api.cancel_job(job_id=job.id, namespace=self.namespace, token=self.token)
            return True

        async def ended() -> bool | None:
            return None if await self._is_live(job) else True

        try:
            await self._call(end, f"job {job.id}", settled=ended)
        except Answered:
            if await self._is_live(job):
                raise

    async def hardware(self) -> dict[str, Flavor]:
        """What may be rented now, by name, with today's prices."""
        listed = await self._call(lambda api: api.list_jobs_hardware(token=self.token), "hardware")
        found = {}
        for item in listed:
            hours = HOURS.get(item.unit_label)
            if hours is None:
                raise HubUnavailable(f"the Hub prices {item.name} by the {item.unit_label}, an unknown unit")
            kind = f"{item.accelerator.quantity} x {item.accelerator.model}" if item.accelerator else "no GPU"
            text = f"{item.cpu}, {item.ram}, {kind}"
            found[item.name] = Flavor(item.name, item.unit_cost_usd / hours, text)
        return found

    def logs(self, job: Job, *, follow: bool, tail: int | None) -> Iterator[str]:
        """Lines that a job has written. Blocks; with ``follow`` until the job ends."""
        try:
            yield from self._api.fetch_job_logs(
                job_id=job.id, namespace=self.namespace, token=self.token, follow=follow, tail=tail
            )
        except FAULTS as exc:
            raise told(exc, f"logs of job {job.id}", self._hidden) from None

    def url(self) -> str:
        """Where ``create`` posts to."""
        return f"{self.endpoint}/api/jobs/{self.namespace}"

    def body(self, request: JobRequest) -> dict[str, Any]:
        """What ``create`` would post, to the letter, but for the secrets."""
        arguments = self._arguments(request)
        for explicit in ("namespace", "token"):
            del arguments[explicit]
        arguments["secrets"] = dict.fromkeys(request.secrets, HIDDEN)
        return _create_job_spec(**arguments)

    def _arguments(self, request: JobRequest) -> dict[str, Any]:
        return {
            "image": request.image,
            "command": list(request.command),
            "env": dict(request.env),
            "secrets": dict(request.secrets),
            "flavor": request.flavor,
            "timeout": request.timeout_s,
            "attempts": request.attempts if request.attempts > 1 else None,
            "name": request.name,
            "labels": dict(request.labels),
            "volumes": [volume(mount) for mount in request.mounts] or None,
            "expose": list(request.expose) or None,
            "network_group": request.network_group,
            "network_aliases": list(request.network_aliases),
            "namespace": self.namespace,
            "token": self.token,
        }

    async def _live(self, request: JobRequest) -> Job | None:
        jobs = await self.jobs_of(request.labels[LABEL_RUN])
        return next((job for job in jobs if job.live and job.slot == request.slot.name), None)

    async def _is_live(self, job: Job) -> bool:
        def look(api: HfApi) -> JobInfo:
            return api.inspect_job(job_id=job.id, namespace=self.namespace, token=self.token)

        try:
            return _job(await self._call(look, f"job {job.id}")).live
        except Answered as exc:
            if exc.status == 404:  # noqa: PLR2004 the status of what is gone
                return False
            raise

    async def _call(
        self,
        request: Callable[[HfApi], T],
        what: str,
        settled: Callable[[], Awaitable[T | None]] | None = None,
    ) -> T:
        """A call, repeated while it may help."""

        def explain(exc: Exception) -> GrpoError:
            return told(exc, what, self._hidden)

        patience = Patience(self._patience_s, self._pause_s)
        return await self._client.repeat(patience, request, explain, settled=settled)


def volume(mount: str) -> Volume:
    """The client's own kind of mount. Raises OperatorError on a text that is none."""
    try:
        found = parse_hf_mount(mount)
    except (HfUriError, ValueError) as exc:
        raise OperatorError(f"mount {mount!r}: {exc}".replace("\n", " ")) from exc
    source = found.source
    return Volume(
        type=source.type,
        source=source.id,
        mount_path=found.mount_path,
        revision=source.revision,
        read_only=found.read_only,
        path=source.path_in_repo or None,
    )


def _job(info: JobInfo) -> Job:
    labels = info.labels or {}
    return Job(
        id=info.id,
        slot=labels.get(LABEL_SLOT, ""),
        stage=str(getattr(info.status.stage, "value", info.status.stage)),
        flavor=str(getattr(info.flavor, "value", info.flavor)),
        created_at=info.created_at or datetime.now(UTC),
        mark=labels.get(LABEL_KEY, ""),
        spec_digest=labels.get(LABEL_SPEC, ""),
        page=info.url,
        exposed=tuple(info.status.expose_urls or ()),
        message=info.status.message or "",
        lived_s=_lived_s(info),
    )


def _lived_s(info: JobInfo) -> float:
    begun = info.started_at or info.created_at
    return (info.finished_at - begun).total_seconds() if info.finished_at and begun else 0.0
