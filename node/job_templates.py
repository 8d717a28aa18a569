"""What a job of each kind runs, on what, and for how long: one TOML file a kind, as in ``deploy/hf_jobs``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from protocol.errors import OperatorError
from protocol.spec import Count, Positive, Spec, first_fault

JobKind = Literal["broker", "learner", "sampler", "verifier"]
KINDS: tuple[JobKind, ...] = get_args(JobKind)
"""In the order in which they start; they stop in the other."""

PORT = 4222
"""Where peers of the same network group reach the broker."""
WEBSOCKET_PORT = 8000
"""Where everybody else does, through the port that the broker's job exposes."""

PLACEHOLDERS = ("run", "slot", "broker", "port", "websocket")
BROKER_URL = f"nats://${{HF_NETWORK_GROUP_PREFIX}}broker:{PORT}"
"""The broker's alias in its network group; the job's shell fills in the prefix."""

SECRET_WORDS = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|SEED|API_?KEY", re.IGNORECASE)

Texts = Annotated[tuple[str, ...], Field(strict=False)]
Ports = Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], Field(strict=False)]


class JobTemplateSpec(Spec):
    """One kind of job; ``up``'s options come before it."""

    command: str
    """Shell text. ``{run}``, ``{slot}`` (such as ``learner-1``), ``{broker}`` (its URL), ``{port}`` and
    ``{websocket}`` are filled in."""
    image: str = "python:3.12"
    """Python 3.11 or later with pip and a shell; git too if ``install`` names a repository."""
    install: str | None = None
    """What ``pip install`` gets, such as ``git+https://…@commit`` or a wheel in a mounted bucket; ``none`` if
    the image has grpo-node already."""
    flavor: str = "cpu-basic"
    timeout_h: Positive = 12.0
    """The Hub ends the job after so many hours: a bound on the bill. Its own default is half an hour."""
    attempts: Count = 1
    """How often the Hub itself starts a job that failed, the first time included."""
    env: dict[str, str] = {}
    secrets: Texts = ()
    """Variables of the launching environment that go along as secrets, such as ``WANDB_API_KEY``."""
    mounts: Texts = ()
    """``hf://[buckets/|datasets/]owner/name[@revision][/path]:/where[:ro|:rw]``."""
    expose: Ports = ()
    """Ports that the Hub's proxy reaches from outside, for those who show a token of the namespace."""

    @field_validator("command")
    @classmethod
    def _knows_its_placeholders(cls, command: str) -> str:
        unknown = set(re.findall(r"(?<!\$)\{(\w+)\}", command)) - set(PLACEHOLDERS)
        if unknown:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"no such placeholder: {{{min(unknown)}}}; there are {known}")
        return command

    @field_validator("env")
    @classmethod
    def _holds_no_secret(cls, env: dict[str, str]) -> dict[str, str]:
        if found := [name for name in env if SECRET_WORDS.search(name)]:
            raise ValueError(
                f"{found[0]} looks like a secret, and everybody in the namespace can read env; export it "
                f"where you launch, and write secrets = [{found[0]!r}]"
            )
        return env

    def filled(self, values: Mapping[str, str]) -> str:
        """The command with every placeholder filled in."""
        return re.sub(r"(?<!\$)\{(\w+)\}", lambda found: values[found[1]], self.command)


def _peer(role: JobKind) -> str:
    """Whatever lies on a job's disk was put there for the run: it may name all of it."""
    node = f"--role {role} --run {{run}} --name {{slot}}"
    return f'exec grpo-node {node} --broker "{{broker}}" --wait --allow-path /'


TEMPLATES: dict[JobKind, JobTemplateSpec] = {
    "broker": JobTemplateSpec(
        command="printf '%s' \"$GRPO_RUN_FILE\" > run.toml\n"
        "exec grpo-node jobs broker run.toml --port {port} --websocket {websocket}",
        timeout_h=24.0,
        expose=(WEBSOCKET_PORT,),
    ),
    "learner": JobTemplateSpec(command=_peer("learner"), flavor="a10g-small"),
    "sampler": JobTemplateSpec(command=_peer("sampler"), flavor="a10g-small"),
    "verifier": JobTemplateSpec(command=_peer("verifier"), flavor="cpu-upgrade"),
}
"""The same as in ``deploy/hf_jobs``; there they are explained."""


def read_templates(directory: Path | None) -> dict[JobKind, JobTemplateSpec]:
    """The templates in ``directory`` (``learner.toml``…), and the built-in ones for kinds it lacks.

    Raises OperatorError, in one line, for a directory without templates and for a fault in one.
    """
    if directory is None:
        return dict(TEMPLATES)
    files = {kind: directory / f"{kind}.toml" for kind in KINDS if (directory / f"{kind}.toml").is_file()}
    if not files:
        wanted = ", ".join(f"{kind}.toml" for kind in KINDS)
        raise OperatorError(f"--templates {directory}: none of {wanted} is there")
    return TEMPLATES | {kind: _read(file) for kind, file in files.items()}


def _read(file: Path) -> JobTemplateSpec:
    try:
        return JobTemplateSpec.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as exc:
        raise OperatorError(f"{file}: cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise OperatorError(f"{file}: not TOML: {exc}") from exc
    except ValidationError as exc:
        raise OperatorError(f"{file}: {first_fault(exc)}") from exc
