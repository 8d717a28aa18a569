"""What ``grpo-node jobs`` takes from the command line, and the swarm that it makes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import ValidationError

from node.job_memory import recall
from node.job_plan import SwarmSecrets, SwarmSpec
from node.job_templates import KINDS, JobKind, JobTemplateSpec, read_templates
from protocol.errors import OperatorError
from protocol.runspec import RunSpec
from protocol.spec import first_fault

S = TypeVar("S", SwarmSpec, JobTemplateSpec)

COMPUTING: tuple[JobKind, ...] = ("learner", "sampler")
"""Kinds that ``--flavor NAME`` means; a broker and a verifier need no GPU."""

NamespaceOption = Annotated[
    str | None, typer.Option(help="User or organisation that runs and pays. Default: the token's owner.")
]
FlavorOption = Annotated[
    list[str] | None,
    typer.Option(help="Hardware of learners and samplers, or KIND=NAME, such as verifier=cpu-upgrade."),
]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a person said; None and empty leave a thing as it was."""

    learners: int | None = None
    samplers: int | None = None
    verifiers: int | None = None
    flavors: tuple[str, ...] = ()
    install: str | None = None
    image: str | None = None
    timeout_h: float | None = None
    mounts: tuple[str, ...] = ()
    templates: Path | None = None
    new_logins: bool = False
    """Make the broker's keys, and so all logins, anew; nodes stay who they are."""

    def check(self) -> None:
        """Raises OperatorError for what can be told without the Hub."""
        from node.hub_jobs import volume

        self._flavors()
        for mount in self.mounts:
            volume(mount)

    def counted(self, swarm: SwarmSpec) -> SwarmSpec:
        """``swarm`` with the counts that were given. Raises OperatorError."""
        counts = {"learners": self.learners, "samplers": self.samplers, "verifiers": self.verifiers}
        given = {name: count for name, count in counts.items() if count is not None}
        return _checked(SwarmSpec, swarm.model_dump() | given)

    def template(self, kind: JobKind, base: JobTemplateSpec) -> JobTemplateSpec:
        """``base`` with what was given for jobs of this kind. Raises OperatorError."""
        changes: dict[str, object] = {
            "flavor": self._flavors().get(kind),
            "install": self.install,
            "image": self.image,
            "timeout_h": self._timeout_h(kind, base),
            "mounts": (*base.mounts, *self.mounts) if self.mounts else None,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        return _checked(JobTemplateSpec, base.model_dump() | given)

    def _timeout_h(self, kind: JobKind, base: JobTemplateSpec) -> float | None:
        """A broker stays at least as long as its peers."""
        if self.timeout_h is None or kind != "broker":
            return self.timeout_h
        return max(base.timeout_h, self.timeout_h)

    def _flavors(self) -> dict[JobKind, str]:
        found: dict[JobKind, str] = {}
        for text in self.flavors:
            kind, equals, name = text.rpartition("=")
            if equals and kind not in KINDS:
                raise OperatorError(f"--flavor {text}: no such kind; there are {', '.join(KINDS)}")
            found.update({one: name for one in KINDS if one == kind or (not equals and one in COMPUTING)})
        return found


def swarm_for(
    spec: RunSpec, text: str, namespace: str, options: JobOptions, place: Path
) -> tuple[SwarmSpec, SwarmSecrets]:
    """The swarm to bring up: what was brought up before, changed by ``options``, with its secrets.

    ``--templates`` begins anew. Raises OperatorError.
    """
    if not re.fullmatch(r"[\w.-]+", namespace):
        raise OperatorError(f"--namespace {namespace!r} is no name on the Hub")
    before = recall(place)
    own = before[1] if before else SwarmSecrets()
    if options.new_logins:
        own = SwarmSecrets(seeds=own.seeds)
    bases = before[0].templates if before and options.templates is None else read_templates(options.templates)
    counts = before[0].counts if before else {}
    swarm = SwarmSpec(
        namespace=namespace,
        run=spec.name,
        spec_digest=spec.digest,
        run_file=text,
        learners=counts.get("learner", 1),
        samplers=counts.get("sampler", 1),
        verifiers=counts.get("verifier", 1),
        templates={kind: options.template(kind, bases[kind]) for kind in KINDS},
    )
    swarm = options.counted(swarm)
    return swarm, own.for_slots(swarm)


def remembered(place: Path, run: str) -> tuple[SwarmSpec, SwarmSecrets]:
    """What ``up`` was told last. Raises OperatorError if it was never called here."""
    found = recall(place)
    if found is None:
        raise OperatorError(f"no swarm of run {run} was started from here; use: grpo-node jobs up RUNFILE")
    return found


def _checked(kind: type[S], values: dict[str, object]) -> S:
    try:
        return kind.model_validate(values)
    except ValidationError as exc:
        raise OperatorError(first_fault(exc)) from exc
