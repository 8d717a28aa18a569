"""From what a person wants to run to one request a job: names, labels, secrets, network. No I/O.

Every job has a slot: ``broker``, ``learner-1``, ``sampler-2``… The slot is also the node's name, and its key
comes along as a secret. So a job that takes the place of a dead one is the same peer to everybody else, and a
learner goes on from its own head.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from node.job_templates import BROKER_URL, KINDS, PORT, WEBSOCKET_PORT, JobKind, JobTemplateSpec
from node.settings import ENV_BROKER_KEYS, ENV_IDENTITY, ENV_JOIN, ENV_RUN_FILE
from protocol.errors import OperatorError
from protocol.identity import Identity
from protocol.spec import Name, Spec

LABEL_RUN, LABEL_SLOT, LABEL_KEY, LABEL_SPEC = "grpo-run", "grpo-slot", "grpo-key", "grpo-spec"
ENV_HUB_TOKEN = "HF_TOKEN"
GROUP_CHARS_MAX = 46
"""The Hub's limit on names of network groups."""
NAMES_KEPT = 30
"""Characters of a long run name that its network group keeps."""
SLOTS_MAX = 100
"""Jobs of one kind; more is a typing error."""
GUESTS_MAX = 20
"""Machines elsewhere that may join, of each role."""

SlotCount = Annotated[int, Field(ge=0, le=SLOTS_MAX)]


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One place in a swarm, that one job at a time fills."""

    kind: JobKind
    number: int = 1

    @property
    def name(self) -> str:
        """The node's name in it."""
        return self.kind if self.kind == "broker" else f"{self.kind}-{self.number}"


class SwarmSpec(Spec):
    """What is to run where; kept by the machine that launches, without its secrets."""

    namespace: str
    run: Name
    spec_digest: str
    """Digest of the run file's settings, before anything in it is pinned."""
    run_file: str
    """Its text."""
    learners: SlotCount = 1
    samplers: SlotCount = 1
    verifiers: SlotCount = 1
    templates: dict[JobKind, JobTemplateSpec]

    @property
    def counts(self) -> dict[JobKind, int]:
        """Slots of each kind."""
        peers = {"learner": self.learners, "sampler": self.samplers, "verifier": self.verifiers}
        return {"broker": 1} | peers  # type: ignore[return-value]

    @property
    def slots(self) -> list[Slot]:
        """All places, the broker's first."""
        return [Slot(kind, number + 1) for kind in KINDS for number in range(self.counts[kind])]


def _new_keys() -> str:
    from node.broker_accounts import Keys

    return Keys.generate().model_dump_json()


@dataclass(frozen=True, slots=True)
class SwarmSecrets:
    """What only the launching machine knows, and of which each job gets its part."""

    keys: str = field(default_factory=_new_keys, repr=False)
    """The broker's (``node.broker_accounts.Keys`` as JSON): they make every login."""
    seeds: dict[str, str] = field(default_factory=dict, repr=False)
    """Each slot's nkey seed."""
    invitations: dict[str, str] = field(default_factory=dict, repr=False)
    """What lets each slot but the broker's into the broker, for its own role."""

    @property
    def mark(self) -> str:
        """Tells two brokers' keys apart and says nothing about either."""
        return hashlib.sha256(b"grpo-node jobs\x00" + self.keys.encode()).hexdigest()[:12]

    def for_slots(self, swarm: SwarmSpec) -> SwarmSecrets:
        """The same, with a seed and an invitation for every slot."""
        from node.job_logins import invitation, read_keys

        keys, seeds, invitations = read_keys(self.keys), dict(self.seeds), dict(self.invitations)
        for slot in swarm.slots:
            if slot.name not in seeds:
                seeds[slot.name] = Identity.generate(slot.name).seed.decode()
            if slot.kind != "broker" and slot.name not in invitations:
                url = f"nats://broker:{PORT}"  # its name in the network group; the command knows the prefix
                made = invitation(keys, swarm.run, slot.kind, slot.name, url)
                invitations[slot.name] = made.word()
        return SwarmSecrets(self.keys, seeds, invitations)


@dataclass(frozen=True, slots=True)
class HubTokens:
    """What jobs show to the Hub."""

    writes: str = field(repr=False)
    """The broker's and the learners': they store settings and updates."""
    reads: str = field(repr=False)
    """The others'."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One job to be; what it needs to be secret never shows in ``repr``."""

    slot: Slot
    name: str
    image: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    flavor: str
    timeout_s: int
    attempts: int
    labels: Mapping[str, str]
    mounts: tuple[str, ...]
    expose: tuple[int, ...]
    network_group: str
    network_aliases: tuple[str, ...]


def plan(
    swarm: SwarmSpec, own: SwarmSecrets, hub: HubTokens, further: Callable[[str], str | None]
) -> dict[Slot, JobRequest]:
    """One request for each slot, with the secrets of its role only.

    ``further`` reads secrets that templates name. Raises OperatorError for what no swarm could run with.
    """
    check_store(swarm)
    own = own.for_slots(swarm)
    return {slot: _request(swarm, slot, own, hub, further) for slot in swarm.slots}


def _request(
    swarm: SwarmSpec, slot: Slot, own: SwarmSecrets, hub: HubTokens, further: Callable[[str], str | None]
) -> JobRequest:
    template = swarm.templates[slot.kind]
    hidden = _secrets(slot, own, hub)
    for name in template.secrets:
        value = further(name)
        if not value:
            raise OperatorError(f"the {slot.kind}'s template wants the secret {name}, which is not set here")
        hidden[name] = value
    return JobRequest(
        slot=slot,
        name=f"{swarm.run}-{slot.name}",
        image=template.image,
        command=("sh", "-euc", f"{_installation(slot, template)}{_command(swarm, slot)}"),
        env=template.env | ({ENV_RUN_FILE: swarm.run_file} if slot.kind == "broker" else {}),
        secrets=hidden,
        flavor=template.flavor,
        timeout_s=round(template.timeout_h * 3600),
        attempts=template.attempts,
        labels=labels(swarm, own, slot),
        mounts=template.mounts,
        expose=template.expose,
        network_group=network_group(swarm.run),
        network_aliases=(slot.name,),
    )


def _secrets(slot: Slot, own: SwarmSecrets, hub: HubTokens) -> dict[str, str]:
    """What a job of this slot must show, to be this node and no other."""
    itself = {ENV_IDENTITY: own.seeds[slot.name]}
    if slot.kind == "broker":
        return {ENV_BROKER_KEYS: own.keys, ENV_HUB_TOKEN: hub.writes} | itself
    token = hub.writes if slot.kind == "learner" else hub.reads
    return {ENV_JOIN: own.invitations[slot.name], ENV_HUB_TOKEN: token} | itself


def labels(swarm: SwarmSpec, own: SwarmSecrets, slot: Slot) -> dict[str, str]:
    """What finds a job again: its run and slot, and by which settings and secrets it was made."""
    return {
        LABEL_RUN: swarm.run,
        LABEL_SLOT: slot.name,
        LABEL_SPEC: swarm.spec_digest,
        LABEL_KEY: own.mark,
    }


def network_group(run: str) -> str:
    """The network group of a run's jobs; a long name is cut and told apart by a digest."""
    group = f"grpo-{run}"
    if len(group) <= GROUP_CHARS_MAX:
        return group
    return f"grpo-{run[:NAMES_KEPT].rstrip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def check_store(swarm: SwarmSpec) -> None:
    """Raises OperatorError unless all jobs reach the run's store."""
    from protocol.runspec import RunSpec

    store = urlsplit(RunSpec.from_toml(swarm.run_file, "the run file").store.url)
    if store.scheme == "nats":
        raise OperatorError(
            "store.url: nats:// lies on the broker's disk, and that of a job ends with it; use "
            f"hf://buckets/{swarm.namespace}/NAME"
        )
    if store.scheme not in {"", "file"}:
        return
    for kind in KINDS:
        places = [mount.removesuffix(":rw").rpartition(":")[2] for mount in swarm.templates[kind].mounts]
        if store.path.startswith("/") and any(
            store.path == place or store.path.startswith(f"{place}/") for place in places
        ):
            continue
        raise OperatorError(
            f"store.url: {store.path!r} is a directory, and jobs share no disk; use "
            f"hf://buckets/{swarm.namespace}/NAME (the {kind}'s job has nothing mounted there)"
        )


def _installation(slot: Slot, template: JobTemplateSpec) -> str:
    if template.install is None:
        raise OperatorError(
            f"how does grpo-node get onto the {slot.kind}'s job? --install 'git+https://…@commit', or a "
            "wheel in a mounted bucket, or none if the image has it"
        )
    if template.install == "none":
        return ""
    wanted = shlex.join(shlex.split(template.install))
    return f"python -m pip install --quiet --retries 10 --root-user-action ignore {wanted}\n"


def _command(swarm: SwarmSpec, slot: Slot) -> str:
    values = {"run": swarm.run, "slot": slot.name, "broker": BROKER_URL}
    ports = {"port": str(PORT), "websocket": str(WEBSOCKET_PORT)}
    return swarm.templates[slot.kind].filled(values | ports)
