"""Runs: create one from a run file, with everything pinned that peers must agree on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from node.models import LocalModel, load_tokenizer, pinned, resolve_model, stop_token_ids, weight_names
from node.run_bus import RunBus, find_run
from node.stores import create_store, open_store, store_place
from protocol.codec import encode
from protocol.errors import OperatorError, StoreConflict, WrongRevision
from protocol.identity import Identity
from protocol.manifest import EntryKind, Manifest
from protocol.messages import RunState
from protocol.ports import AdapterStore
from protocol.runspec import RunSpec
from protocol.store_spec import StoreSpec
from protocol.subjects import SPEC_KEY, Bucket
from roles.policy.update_paths import counts_by_path
from roles.tasks.open import open_tasks
from roles.tasks.prompts import PromptBuilder
from roles.tasks.taskset import TaskSet
from roles.turns.dialogue import Dialogue
from roles.turns.tools import describe
from roles.turns.users import check_user
from roles.verifier.rewards.registry import open_reward


class RunLost(OperatorError):
    """The store holds updates of a run that this broker does not know."""


CHECKED_ROWS = 1000
"""Prompts that a checked ``pin_run`` builds; a learner builds them all."""


def read_run_file(path: Path) -> RunSpec:
    """Parse a run file; raises OperatorError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise OperatorError(f"{path}: cannot read the run file: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise OperatorError(f"{path}: not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    return RunSpec.from_toml(text, str(path))


def pin_run(spec: RunSpec, models: Path, *, checked: bool = False) -> RunSpec:
    """Fix what may differ between machines: model digests, task-set digest, tools, the store's full path.

    Reads model files and the whole task set. With ``checked`` it also finds now what every node would
    find later, which loads the tokenizer. Raises OperatorError for whatever cannot be used.
    """
    if spec.tools is not None:
        spec = spec.model_copy(update={"tools": asyncio.run(describe(spec.tools))})
    if checked and spec.user is not None:
        asyncio.run(check_user(spec.user))
    model = resolve_model(spec.model, models)
    tasks = open_tasks(spec.tasks, spec.seed, Path.cwd())
    store = located_store(spec.store)
    store_place(store)  # refuses a URL of no store
    if checked:
        _check(spec, model, tasks)
    changes = {
        "model": pinned(spec.model, model),
        "tasks": spec.tasks.model_copy(update={"digest": tasks.digest}),
        "store": store,
    }
    return spec.model_copy(update=changes)


def located_store(store: StoreSpec) -> StoreSpec:
    """The same store, a directory by its full path."""
    if urlsplit(store.url).scheme:
        return store
    return store.model_copy(update={"url": Path(store.url).expanduser().resolve().as_uri()})


def _check(spec: RunSpec, model: LocalModel, tasks: TaskSet) -> None:
    """Refuse prompts that do not fit, and rewards and LoRA targets that do not exist."""
    tokenizer = load_tokenizer(model.directory)
    prompts = PromptBuilder(tokenizer, spec.tasks, spec.tools, spec.user)
    Dialogue.of(spec, tokenizer, stop_token_ids(model.directory, tokenizer))
    limit = spec.sampling.max_new_tokens
    prompts.select(tasks.train[:CHECKED_ROWS], context_tokens=model.context_tokens, max_new_tokens=limit)
    for reward in spec.rewards:
        open_reward(reward, spec.tasks.arguments)
    if not isinstance(spec.lora.target_modules, str):
        modules = {name.removesuffix(".weight") for name in weight_names(model.directory)}
        for target in spec.lora.target_modules:
            if not any(module == target or module.endswith(f".{target}") for module in modules):
                raise OperatorError(f"lora.target_modules: {spec.model.ref} has no module named {target!r}")


async def create_run(bus: RunBus, spec: RunSpec, identity: Identity, cache: Path) -> bool:
    """Store a pinned run in the bucket and at the broker; False if the same run is there already.

    Raises RunLost if this broker lost it, OperatorError if a run of this name with other settings exists.
    """
    state = RunState(spec_json=spec.model_dump_json(), spec_digest=spec.digest, creator=identity.node)
    found = await find_run(bus)
    if found is not None:
        check_same(spec, found.spec_digest)
        return False
    store = open_store(spec.store, cache, bus)
    await create_store(spec.store, bus)
    if counts_by_path(await store.list(f"{spec.name}/updates")):
        raise RunLost(
            f"the store holds updates of run {spec.name!r} that this broker does not know; restore it with: "
            f"grpo-node recover --run {spec.name} --store {spec.store.url}, or choose another name"
        )
    await store_settings(store, spec, identity)
    await bus.create_run(spec)
    try:
        await bus.put(Bucket.RUN, SPEC_KEY, encode(state, identity), expected=0)
    except WrongRevision:
        found = await find_run(bus)
        assert found is not None
        check_same(spec, found.spec_digest)
        return False
    return True


async def store_settings(store: AdapterStore, spec: RunSpec, identity: Identity) -> None:
    """Put a run's settings into the bucket, from where ``recover`` reads them."""
    files = {"run.json": spec.model_dump_json(indent=1).encode()}
    manifest = Manifest(
        path=f"{spec.name}/run-{spec.digest}",
        kind=EntryKind.RUN,
        run=spec.name,
        author=identity.node,
        files=Manifest.describe(files),
    )
    # Whoever created the same settings first, perhaps at a broker that lost its disk, signed them.
    with suppress(StoreConflict):
        await store.publish(manifest.signed(identity), files)


def check_same(spec: RunSpec, found_digest: str) -> None:
    """Raises OperatorError if the run of this name that exists has other settings."""
    if found_digest != spec.digest:
        raise OperatorError(
            f"a run {spec.name!r} with other settings exists; choose another name in the run file, "
            f"or restore its settings (theirs {found_digest}, yours {spec.digest})"
        )


async def pin_run_off_loop(spec: RunSpec, models: Path, *, checked: bool = False) -> RunSpec:
    """``pin_run`` on a thread."""
    return await asyncio.to_thread(pin_run, spec, models, checked=checked)
