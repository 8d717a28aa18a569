"""The composition root: the one place that joins roles to adapters.

settings ─▶ broker ─▶ RunSpec ─▶ store, model, tasks ─▶ parts ─▶ Node
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from node.broker_wait import wait_for_port
from node.consent import Consent
from node.devices import choose_device, only_device
from node.engines import open_engine
from node.identity_file import own_identity
from node.joining import node_access
from node.models import Detokenizer, LocalModel, load_tokenizer, resolve_model, stop_token_ids
from node.names import claim_home
from node.nats_bus import NatsBus
from node.node import Node, Part
from node.presence import Presence
from node.run_bus import find_run, no_run, wait_for_run
from node.runtime import ThreadOffload
from node.settings import NodeSettings, prepare_hub
from node.stores import open_store
from node.system_clock import SystemClock
from protocol.clock import VectorClock
from protocol.identity import Identity
from protocol.ports import AdapterStore, Bus
from protocol.runspec import RunSpec
from roles.learner.learner import Learner
from roles.ring import Ring
from roles.sampler.sampler import Sampler
from roles.sampler.turns import Conversations
from roles.standings import Standings
from roles.tasks.open import describe_skipped, open_tasks
from roles.tasks.prompts import Prompt, PromptBuilder
from roles.tasks.taskset import Split, TaskSet
from roles.turns.dialogue import Dialogue
from roles.turns.tools import ToolProcess
from roles.turns.users import UserProcess
from roles.verifier.auditor import PolicyAuditor
from roles.verifier.checks import Rules
from roles.verifier.rewards.scorer import Scorer
from roles.verifier.verifier import Verifier


@dataclass(frozen=True, slots=True)
class Ground:
    """What all parts of a node stand on."""

    settings: NodeSettings
    identity: Identity
    bus: Bus
    spec: RunSpec
    store: AdapterStore
    model: LocalModel
    presence: Presence
    home: Path
    """The node's own directory."""

    def ring(self, role: str) -> Ring:
        """A role's voice."""
        return Ring(self.bus, self.identity, self.spec, role, SystemClock())


async def build_node(settings: NodeSettings) -> Node:
    """Connect, read the run, check that this machine's copies agree with it, and build every part.

    Raises OperatorError with one clear line for whatever the operator must change.
    """
    access = await asyncio.to_thread(node_access, settings)
    home = await asyncio.to_thread(claim_home, settings)
    identity = await asyncio.to_thread(own_identity, home / "identity.nk", home.name, settings.identity_seed)
    if settings.wait:
        await wait_for_port(access)
    bus = await NatsBus.connect(access, settings.run, node=identity.node)
    try:
        spec = await read_spec(bus, settings)
        consent = Consent(settings.invitation is not None, settings.allow_modules, settings.allowed_paths)
        await asyncio.to_thread(consent.check, spec, settings.roles, Path.cwd())
        prepare_hub(home / "xet")
        store = open_store(spec.store, home / "store", bus)
        model = await asyncio.to_thread(resolve_model, spec.model, settings.places.models)
        ring = Ring(bus, identity, spec, "node", SystemClock())
        if set(settings.roles) & {"learner", "sampler"}:
            settings = replace(settings, device=await asyncio.to_thread(choose_device, settings.device))
        detail = {"device": settings.device, "threads": str(settings.threads)}
        presence = Presence(ring, settings.roles, detail)
        ground = Ground(settings, identity, bus, spec, store, model, presence, home)
        ring.log.info("node_joined", run=spec.name, roles=settings.roles, spec=spec.digest, **detail)
        return Node(ring, presence, [await _BUILDERS[role](ground) for role in settings.roles])
    except BaseException:
        await bus.close()
        raise


async def read_spec(bus: NatsBus, settings: NodeSettings) -> RunSpec:
    """The run's settings; without ``settings.wait`` raises OperatorError if there is no such run here."""
    if settings.wait:
        state = await wait_for_run(bus, settings.run, SystemClock())
    elif (found := await find_run(bus)) is not None:
        state = found
    else:
        raise no_run(settings.run)
    return RunSpec.model_validate_json(state.spec_json)


async def build_learner(ground: Ground) -> Part:
    """The learner: trains on this node's device."""
    from roles.learner.torch_policy import TorchPolicy

    spec, offload, aside = ground.spec, ThreadOffload("learner"), ThreadOffload("learner-files")
    tasks, prompts = await asyncio.to_thread(_open_prompts, ground)
    chosen = {split: _select(ground, tasks, prompts, split) for split in _SPLITS}
    policy = await offload(lambda: TorchPolicy.open(ground.model.directory, spec, ground.settings.device))
    learner = Learner(
        ground.ring("learner"),
        ground.store,
        policy,
        offload=offload,
        aside=aside,
        train=chosen["train"],
        held_out=chosen["held_out"],
    )

    async def close() -> None:
        await offload.close()
        await aside.close()

    return Part(
        "learner",
        learner.run,
        lambda: learner.clock,
        lambda: learner.busy,
        close,
        lambda: learner.needs,
    )


async def build_sampler(ground: Ground) -> Part:
    """The sampler: generates on this node's device."""
    spec, settings = ground.spec, ground.settings
    tokenizer = await asyncio.to_thread(load_tokenizer, ground.model.directory)
    eos_ids = stop_token_ids(ground.model.directory, tokenizer)
    dialogue = Dialogue.of(spec, tokenizer, eos_ids)
    tools = await ToolProcess.open(spec.tools) if spec.tools else None
    user = await UserProcess.open(spec.user) if spec.user else None
    engine = await open_engine(spec, settings, ground.model, eos_ids, ground.home)
    offload = ThreadOffload("sampler")
    sampler = Sampler(
        ground.ring("sampler"),
        ground.store,
        engine,
        offload,
        drain_s=settings.grace_s,
        conversations=Conversations(tools, dialogue, user) if dialogue else None,
    )

    async def close() -> None:
        await engine.close()
        await offload.close()
        for process in (tools, user):
            if process:
                await process.close()

    return Part("sampler", sampler.run, lambda: sampler.clock, lambda: sampler.busy, close)


async def build_verifier(ground: Ground) -> Part:
    """The verifier: scores on this node's cores; the only role that opens the answers."""
    spec, settings = ground.spec, ground.settings
    tasks, prompts = await asyncio.to_thread(_open_prompts, ground)
    tokenizer = await asyncio.to_thread(load_tokenizer, ground.model.directory)
    eos_ids = stop_token_ids(ground.model.directory, tokenizer)
    rules = Rules(
        eos_ids=frozenset(eos_ids),
        vocab_size=ground.model.vocab_size,
        tasks=tasks,
        prompt_of=lambda row: prompts.token_ids(row.prompt, row.system_prompt).tolist(),
        dialogue=Dialogue.of(spec, tokenizer, eos_ids),
        told_of=prompts.told,
    )
    scorer = Scorer(spec.rewards, settings.threads or 1, spec.tasks.arguments)
    await scorer.open()
    offload = ThreadOffload("auditor")
    auditor = await _open_auditor(ground, sorted(rules.eos_ids), offload) if spec.audit.rate else None
    verifier = Verifier(
        ground.ring("verifier"),
        rules,
        Detokenizer(tokenizer),
        scorer,
        trust=ground.presence.key_of,
        auditor=auditor,
        drain_s=settings.grace_s,
    )

    async def run(stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            auditing = group.create_task(auditor.run()) if auditor else None
            await verifier.run(stop)
            if auditing:
                auditing.cancel()

    async def close() -> None:
        await scorer.close()
        await offload.close()

    return Part("verifier", run, VectorClock, lambda: verifier.busy, close)


async def _open_auditor(ground: Ground, eos_ids: Sequence[int], offload: ThreadOffload) -> PolicyAuditor:
    """The verifier's second look, on this node's device: the run's model, loaded once more."""
    from roles.verifier.torch_recompute import Recomputer

    spec = ground.spec
    device = only_device(await asyncio.to_thread(choose_device, ground.settings.device), "verifier")
    recomputer = await offload(
        lambda: Recomputer.open(ground.model.directory, spec.model, spec.lora, eos_ids, device)
    )
    ring = ground.ring("verifier")
    return PolicyAuditor(ring, ground.store, recomputer, Standings(ring), offload=offload)


_SPLITS: tuple[Split, ...] = ("train", "held_out")


def _open_prompts(ground: Ground) -> tuple[TaskSet, PromptBuilder]:
    """The run's rows and how they become token ids. Slow: off the loop."""
    tasks = open_tasks(ground.spec.tasks, ground.spec.seed, Path.cwd())
    spec = ground.spec
    return tasks, PromptBuilder(load_tokenizer(ground.model.directory), spec.tasks, spec.tools, spec.user)


def _select(ground: Ground, tasks: TaskSet, prompts: PromptBuilder, split: Split) -> Sequence[Prompt]:
    """Rows of a split that fit the model; the others are counted and named in the log."""
    rows = tasks.train if split == "train" else tasks.held_out
    selection = prompts.select(
        rows,
        context_tokens=ground.model.context_tokens,
        max_new_tokens=ground.spec.sampling.max_new_tokens,
    )
    if selection.skipped:
        first = describe_skipped(selection.skipped)
        structlog.get_logger().warning(
            "prompts_skipped", split=split, count=len(selection.skipped), first=first
        )
    return selection.prompts


_BUILDERS = {"learner": build_learner, "sampler": build_sampler, "verifier": build_verifier}
