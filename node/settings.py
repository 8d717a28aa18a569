"""Settings of one node: what its operator decides, as opposed to what the run decides.

This is the only file that reads the environment. Everything else gets its settings as arguments.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from protocol.clock import NAME_PATTERN
from protocol.errors import OperatorError

if TYPE_CHECKING:
    from node.invitation import Invitation

Role = Literal["learner", "sampler", "verifier"]
ROLES: tuple[Role, ...] = get_args(Role)

EngineKind = Literal["transformers", "vllm"]
ENGINES: tuple[EngineKind, ...] = get_args(EngineKind)

ROWS_MAX = 128
"""Sequences a sampler decodes at once, unless its operator says otherwise."""

NAME_RULE = "a name is lower-case letters, digits and dashes, at most 48, and no dash first"

ENV_HOME = "GRPO_HOME"
ENV_BROKER = "GRPO_BROKER"
ENV_TOKEN = "GRPO_TOKEN"
ENV_JOIN = "GRPO_JOIN"
ENV_CREDENTIALS = "GRPO_CREDENTIALS"
ENV_CA = "GRPO_CA"
ENV_BEARER = "GRPO_BEARER"
ENV_BEARER_FILE = "GRPO_BEARER_FILE"
ENV_NATS_SERVER = "GRPO_NATS_SERVER"
ENV_IDENTITY = "GRPO_IDENTITY"
ENV_BROKER_KEYS = "GRPO_BROKER_KEYS"
"""Keys of a broker with accounts, as its job gets them."""
ENV_RUN_FILE = "GRPO_RUN_FILE"
"""Text of a run file, as a broker's job gets it; its shell writes it to a file."""
ENV_JOBS_HUB_TOKEN = "GRPO_JOBS_HF_TOKEN"
ENV_JOBS_HUB_READ_TOKEN = "GRPO_JOBS_HF_READ_TOKEN"
ENV_HUB_ENDPOINT = "HF_ENDPOINT"


@dataclass(frozen=True, slots=True)
class Places:
    """Where a node keeps things on this machine."""

    home: Path

    @property
    def models(self) -> Path:
        """Base models made or converted here."""
        return self.home / "models"

    def node(self, run: str, name: str) -> Path:
        """One node's own state: its identity and its verified copies of adapters."""
        return self.home / "nodes" / run / name

    def broker(self, name: str) -> Path:
        """State of an embedded broker."""
        return self.home / "brokers" / name

    def jobs(self, namespace: str, run: str) -> Path:
        """What this machine must remember of jobs that it launched."""
        return self.home / "jobs" / namespace / f"{run}.json"


@dataclass(frozen=True, slots=True)
class Way:
    """How to get into a broker, besides its token."""

    credentials: Path | None = None
    """A NATS credentials file."""
    ca: Path | None = None
    """Certificates to trust instead of the system's."""
    bearer: str | None = field(default=None, repr=False)
    """What a proxy before the broker demands as ``Authorization: Bearer …``."""
    bearer_file: Path | None = None
    """The same in a file, read anew at each connection."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How a sampler comes to its vLLM servers: by a command that starts them, or by their addresses."""

    command: str | None = None
    """Words that start a server, to which model and flags are added; None: vLLM of this environment."""
    urls: tuple[str, ...] = ()
    """Servers that others run."""
    adapters: Path | None = None
    """Directory that this node and the servers see under the same path; None: one of the node's own."""

    def __post_init__(self) -> None:
        """Raise OperatorError on what contradicts itself."""
        if self.urls and self.command is not None:
            raise OperatorError(
                "--vllm-command starts a server, --vllm-url names one that runs: use one of both"
            )
        for url in self.urls:
            if not re.match(r"https?://[^/\s]", url):
                raise OperatorError(f"--vllm-url {url!r} is no address; write http://host:8000")

    @property
    def said(self) -> bool:
        """Whether the operator said anything about vLLM."""
        return self != VllmSettings()


def checked_engine(engine: str, vllm: VllmSettings) -> EngineKind:
    """``engine`` if there is one of this name and ``vllm`` goes with it. Raises OperatorError."""
    if engine not in ENGINES:
        raise OperatorError(f"--engine is one of {', '.join(ENGINES)}, not {engine!r}")
    if engine != "vllm" and vllm.said:
        raise OperatorError("--vllm-command, --vllm-url and --vllm-adapters go with --engine vllm")
    return engine


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What an operator says to one node."""

    run: str
    roles: tuple[Role, ...]
    broker: str
    token: str | None = None
    name: str | None = None
    """Node name; a learner's name is its id and must survive a restart."""
    device: str = "auto"
    threads: int | None = None
    rows_max: int = ROWS_MAX
    """Sequences a sampler decodes at once."""
    grace_s: float = 30.0
    """How long a stopping node finishes what it has in hand."""
    places: Places = Places(Path())
    allow_modules: tuple[str, ...] = ()
    """Python modules (or packages of them) whose functions a run may name as rewards on this node."""
    engine: EngineKind = "transformers"
    vllm: VllmSettings = VllmSettings()
    wait: bool = False
    """Wait for a run that the broker does not have, instead of telling the operator."""
    way: Way = Way()
    invitation: Invitation | None = None
    """What the node was invited with; it says broker, login, run and names."""
    allowed_paths: tuple[Path, ...] = ()
    """Directories that the run may name; asked of guests only."""
    identity_seed: str | None = field(default=None, repr=False)
    """The node's nkey seed, for a node whose disk does not outlive it; absent: kept in its home."""

    def __post_init__(self) -> None:
        """Raise OperatorError on settings no node could run with."""
        if unknown := [role for role in self.roles if role not in ROLES]:
            raise OperatorError(f"no such role: {unknown[0]!r}; roles are {', '.join(ROLES)}")
        if not self.roles:
            raise OperatorError(f"a node needs at least one --role: {', '.join(ROLES)}")
        if len(set(self.roles)) < len(self.roles):
            raise OperatorError("a node plays a role once; start one more node, or raise --rows")
        if not NAME_PATTERN.fullmatch(self.run):
            raise OperatorError(f"--run {self.run!r}: {NAME_RULE}")
        if self.name is not None and not NAME_PATTERN.fullmatch(self.name):
            raise OperatorError(f"--name {self.name!r}: {NAME_RULE}")
        checked_engine(self.engine, self.vllm)
        if self.threads is not None and self.threads < 1:
            raise OperatorError("--threads must be at least 1")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says."""

    places: Places
    broker: str | None
    token: str | None
    nats_server: Path | None
    cores: int
    load: float
    """One-minute load average, 0 where the system has none."""
    way: Way = Way()
    join: str | None = field(default=None, repr=False)
    """An invitation."""
    identity_seed: str | None = field(default=None, repr=False)
    jobs_hub_token: str | None = field(default=None, repr=False)
    """What jobs show to the Hub; absent: the token that launches them."""
    jobs_hub_read_token: str | None = field(default=None, repr=False)
    """What jobs show that only read there; absent: what the others show."""
    broker_keys: str | None = field(default=None, repr=False)
    hub_endpoint: str | None = None


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read everything this project takes from its surroundings, once."""
    environ = os.environ if environ is None else environ
    home = environ.get(ENV_HOME)
    affinity = getattr(os, "sched_getaffinity", None)
    return Environment(
        places=Places(Path(home).expanduser() if home else default_home(environ)),
        broker=environ.get(ENV_BROKER),
        token=environ.get(ENV_TOKEN),
        nats_server=_path(environ, ENV_NATS_SERVER),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        way=Way(
            credentials=_path(environ, ENV_CREDENTIALS),
            ca=_path(environ, ENV_CA),
            bearer=environ.get(ENV_BEARER),
            bearer_file=_path(environ, ENV_BEARER_FILE),
        ),
        join=environ.get(ENV_JOIN),
        identity_seed=environ.get(ENV_IDENTITY),
        jobs_hub_token=environ.get(ENV_JOBS_HUB_TOKEN),
        jobs_hub_read_token=environ.get(ENV_JOBS_HUB_READ_TOKEN),
        broker_keys=environ.get(ENV_BROKER_KEYS),
        hub_endpoint=environ.get(ENV_HUB_ENDPOINT),
    )


def read_secret(name: str) -> str | None:
    """A variable that the operator named to be handed on, and nothing else."""
    return os.environ.get(name)


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name)
    return Path(value).expanduser() if value else None


def default_home(environ: Mapping[str, str]) -> Path:
    """The operating system's place for data that may be made again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo-node"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-node"


def prepare_process(threads: int) -> None:
    """Set what must be set before numeric libraries load.

    Two processes whose OpenMP threads spin while they wait fall to a twentieth of their speed on two
    cores, so waiting is passive and the number of threads is explicit.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def prepare_hub(cache: Path) -> None:
    """Set what hf_xet reads when its first transfer begins, unless the operator has.

    Nodes of one machine do not share its cache, and a transfer that falls silent is tried again before the
    store's deadline (hf_xet itself would wait for five minutes).
    """
    os.environ.setdefault("HF_XET_CACHE", str(cache))
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", "20s")


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """The environment for a node that this process starts; it has a login and a key of its own."""
    own = {ENV_CREDENTIALS, ENV_JOIN, ENV_IDENTITY, ENV_BROKER_KEYS}
    ours = {name: value for name, value in os.environ.items() if name not in own}
    return {**ours, **additions}


def process_environment() -> dict[str, str]:
    """This process's environment, for a server that it starts."""
    return dict(os.environ)


def free_threads(environment: Environment) -> int:
    """Threads for a node alone: the cores that others leave free, at least one."""
    return max(1, round(environment.cores - environment.load))


def share_threads(environment: Environment, roles: Sequence[Sequence[Role]]) -> list[int]:
    """Threads for each of several peers on this machine; a verifier computes next to nothing.

    Cores go to peers that compute, evenly, the first ones getting what remains; everybody has one.
    """
    heavy = [index for index, peer in enumerate(roles) if set(peer) & {"learner", "sampler"}]
    each, rest = divmod(environment.cores, max(1, len(heavy)))
    threads = [1] * len(roles)
    for position, index in enumerate(heavy):
        threads[index] = max(1, each + (position < rest))
    return threads
